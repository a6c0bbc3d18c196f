"""Describe checkpoints, find their faults, judge which strategy can load them, and reshard them.

This package decides whether a checkpoint is complete, and writes it as another strategy would have saved it
(`reshard`). It executes nothing that a checkpoint holds.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.checkpoint.checks import describe_model_mismatch, find_problems
    from parakit.checkpoint.command import inspect_command, reshard_command
    from parakit.checkpoint.contents import TORCH_DIST, read_contents
    from parakit.checkpoint.inspection import CheckpointInspection, inspect_folder
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "TORCH_DIST",
    "CheckpointInspection",
    "describe_model_mismatch",
    "find_problems",
    "inspect_command",
    "inspect_folder",
    "read_contents",
    "reshard_command",
]
