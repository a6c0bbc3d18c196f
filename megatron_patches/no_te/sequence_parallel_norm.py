"""Layer norms under sequence parallelism without Transformer Engine.

Megatron's wrapper around torch's norms refuses sequence parallelism. Torch's norm is correct:
each rank normalises its own positions, and parameters marked `sequence_parallel` have their
gradients summed over the tensor-parallel ranks by Megatron's `finalize_model_grads`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Replacement, around, no_te_patch


@around
def _mark_parameters(
    original: Callable[..., torch.nn.Module], cls: type, config: Any, *args: Any, **kwargs: Any
) -> torch.nn.Module:
    unsplit = copy.copy(config)
    unsplit.sequence_parallel = False
    norm = original(cls, unsplit, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


PATCH = no_te_patch(
    "sequence_parallel_norm",
    "torch's LayerNorm is refused under sequence parallelism",
    Replacement("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", _mark_parameters),
)
