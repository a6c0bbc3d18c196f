"""Patches that CPU ranks need: the process itself answers for torch.cuda, and gloo replaces NCCL.

Every patch in this folder is applied on CPU ranks only. Only `megatron_patches.catalogue` imports it.
"""
