"""Megatron's own training iteration for any rank of any world, with tensors that have no contents.

Takes a `RunSpec` and a rank (`job`), gives its calls, memory and parameters, and compares them with the
closed forms (`comparison`). What needs torch is in `rank`, a process of its own.
"""
