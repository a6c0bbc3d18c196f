"""Seconds of an iteration in closed form, from datasheets and a few fitted constants.

The input is a `RunSpec` and a `Cluster` with its calibration; the result is seconds by component (`iteration`). The
search, the published measurements and the report use this package.
"""
