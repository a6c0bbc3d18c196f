"""Patches that do with torch what Megatron cannot do without Transformer Engine, on GPUs and CPU ranks.

Only `megatron_patches.catalogue` imports this folder.
"""
