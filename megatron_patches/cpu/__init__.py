"""What CPU ranks need: torch.cuda answered by the process itself, and gloo in place of NCCL.

Every patch here is applied on CPU ranks alone. Imported by `megatron_patches.catalogue` only.
"""
