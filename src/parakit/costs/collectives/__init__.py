"""Closed forms of every collective that one rank calls in one iteration, one module per parallel
dimension.

The input is a `RunSpec` and a pipeline rank; the results are `CollectiveCall`s with group,
operation, phase, payload and upstream source. `rank.py` combines the modules. The calls are those
of Megatron-LM f4fa7d6b and core_v0.19.0.
"""
