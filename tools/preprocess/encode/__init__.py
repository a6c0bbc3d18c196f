"""Texts to token ids, and these as Megatron stores them, on several threads in bounded memory.

Takes blocks of documents from `input`, gives packed blocks to `output`. Imports no torch.
"""
