"""Mixtures of experts on CPU ranks, and at older versions wherever Transformer Engine is missing.

The expert all-to-all takes its split sizes as NumPy arrays: Megatron makes them where it copies them
from a GPU, so tensors that are on the host already stay tensors, which gloo refuses. Up to 0.16 the
router's gate asks for a name that only an import of Transformer Engine defines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version

from megatron_patches.registry import Patch, Replacement


def _numpy_as_from_a_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = original(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved

    return move


def gate(tokens: torch.Tensor, weight: torch.Tensor, *bias_and_dtype: Any) -> torch.Tensor:
    """The router's logits in its own dtype; shapes [.., hidden], [experts, hidden] to [.., experts].

    The bias comes between weight and dtype from 0.15.0 on.
    """
    *biases, dtype = bias_and_dtype
    bias = biases[0].to(dtype) if biases and biases[0] is not None else None
    return torch.nn.functional.linear(tokens.to(dtype), weight.to(dtype), bias)


SPLITS = Patch(
    name="expert_splits",
    reason="split sizes of the expert all-to-all stay tensors on the host, and gloo wants numbers",
    needed=lambda situation: situation.on_cpu,
    replacements=(
        Replacement(
            "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
            _numpy_as_from_a_gpu,
        ),
    ),
)
GATE = Patch(
    name="router_gate",
    reason="the router's gate asks for a name that only Transformer Engine's import defines",
    needed=lambda situation: not situation.has_transformer_engine,
    replacements=(
        Replacement(
            "megatron.core.transformer.moe.router:router_gating_linear",
            lambda _: gate,
            before=Version("0.17.0rc0"),
        ),
    ),
)
