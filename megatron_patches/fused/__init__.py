"""What Transformer Engine and Apex do faster on a GPU, done with torch alone; off unless asked for.

`FUSED=norm,adamw make train-…` switches patches on by the names in `names.py`. Each changes how
something is computed, never what: the tests hold it against Megatron's own path and float64.
"""
