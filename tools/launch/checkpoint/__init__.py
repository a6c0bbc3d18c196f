"""Checkpoints of a run: how often they are saved, whether they can be read, which one is resumed from.

Takes a run's folder and reads what Megatron wrote there; never imports torch. It lies below what
composes and executes runs; `relaunch` and `resume`, which make a launch of a checkpoint, are above it.
"""
