"""What Megatron cannot do without Transformer Engine, done with torch: on a plain GPU and on CPU ranks.

Imported by `megatron_patches.catalogue` only.
"""
