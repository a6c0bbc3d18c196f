"""Tensors of one training step: written to files, compared with stored files, or replaced by them.

This package decides where a captured tensor and its gradient go (`sinks`). Which tensors a model has, and
their names, each backend decides. `capture` is the function for programs that are not part of the kit.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.capturing.plain import capture
    from parakit.capturing.sinks import (
        Piece,
        Recording,
        Responding,
        Sink,
        StoredTensors,
        norm_of,
        number,
        reach,
        tap,
    )
    from parakit.capturing.state import State, local, perturb
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "Piece",
    "Recording",
    "Responding",
    "Sink",
    "State",
    "StoredTensors",
    "capture",
    "local",
    "norm_of",
    "number",
    "perturb",
    "reach",
    "tap",
]
