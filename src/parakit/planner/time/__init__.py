"""Seconds of an iteration, in closed form, on a cluster known by datasheets and a few constants.

Takes a `RunSpec`, a `Cluster` and its calibration, gives seconds by component (`iteration`). Search,
readings and the report import it.
"""
