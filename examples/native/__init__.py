"""The same GPT as Megatron's, in plain PyTorch: one idea a file; `pretrain_native.py` ties them."""
