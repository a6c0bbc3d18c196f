"""Every call that one rank makes in one iteration, in closed form, by what the model is split in.

Takes a `RunSpec` and a pipeline rank, gives `CollectiveCall`s: group, operation, phase, payload,
upstream source. `rank.py` adds up the others. Read from Megatron-LM f4fa7d6b and core_v0.19.0.
"""
