"""Capture the tensors of one training step: write them to files, or compare or replace them by stored files.

This package decides where a captured tensor and its gradient go (`sinks`). Each backend decides which tensors its
model has, and their names. `capture` is the function for PyTorch programs that are not part of the kit.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.capturing.plain import capture
    from parakit.capturing.sinks import (
        Piece,
        Recording,
        RoundingProbe,
        Sink,
        StoredTensors,
        fp64_scalar,
        norm_without_nan,
        tap,
        update_magnitude,
    )
    from parakit.capturing.state import TrainingState, local_tensor, perturb
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "Piece",
    "Recording",
    "RoundingProbe",
    "Sink",
    "StoredTensors",
    "TrainingState",
    "capture",
    "fp64_scalar",
    "local_tensor",
    "norm_without_nan",
    "perturb",
    "tap",
    "update_magnitude",
]
