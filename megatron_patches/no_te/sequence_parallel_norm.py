"""Allow torch's layer norms under sequence parallelism.

Target: `WrappedTorchNorm.__new__`, Megatron's wrapper of torch's norms. Without the patch, the wrapper
would refuse sequence parallelism. torch's norm is correct there: each rank normalises its own positions,
and Megatron's `finalize_model_grads` sums the gradients of parameters that are marked with
`sequence_parallel` over the tensor-parallel ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Replacement, no_te_patch, wrap_original


@wrap_original
def _mark_parameters(
    original: Callable[..., torch.nn.Module], cls: type, config: Any, *args: Any, **kwargs: Any
) -> torch.nn.Module:
    """Return a norm that was made as if sequence parallelism were off.

    The attribute `sequence_parallel` of its parameters has the value of the real config. Megatron sums the gradients
    of parameters that have True there.
    """
    config_without_sp = copy.copy(config)
    config_without_sp.sequence_parallel = False
    norm = original(cls, config_without_sp, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


PATCH = no_te_patch(
    "sequence_parallel_norm",
    "torch's LayerNorm is refused under sequence parallelism",
    Replacement("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", _mark_parameters),
)
