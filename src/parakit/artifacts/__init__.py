"""Files that runs leave on disk, written and read without torch.

This package decides the files of a run folder, the format of each, and the reader of Megatron's checkpoints,
which executes nothing that a checkpoint holds. Files and folders are written atomically, under locks. Its
modules are public.
"""

__all__ = [
    "capture",
    "checkpoints",
    "dry_run",
    "identity",
    "io",
    "measurements",
    "pickles",
    "run",
    "torch_dist",
    "torch_dist_writer",
    "verdict",
]
