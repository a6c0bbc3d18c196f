"""What must change in Megatron at run time so that it also trains on CPU ranks, unmodified on disk.

`python -m megatron_patches ENTRY ARGS…` applies the patches that the situation needs and runs the
entry. Each module holds the patches of one reason; `catalogue.py` lists them in order.
"""
