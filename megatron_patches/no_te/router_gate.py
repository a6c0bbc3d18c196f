"""Compute the router's logits without Transformer Engine.

Target: `router_gating_linear` of `megatron.core.transformer.moe.router`, up to Megatron 0.16. It calls a
name that only an import of Transformer Engine defines. Without the patch, the first forward pass of a
mixture of experts would fail with `name 'te_general_gemm' is not defined`.
"""

from __future__ import annotations

from typing import Any

import torch
from packaging.version import Version

from megatron_patches.registry import Replacement, no_te_patch


def compute_router_logits(
    tokens: torch.Tensor, weight: torch.Tensor, *bias_and_dtype: Any
) -> torch.Tensor:
    """Return the router's logits [.., experts], computed in the router's type.

    Args:
        tokens: Hidden states [.., hidden].
        weight: Weight of the gate [experts, hidden].
        *bias_and_dtype: The type last. From 0.15.0 on Megatron passes a bias before it, which may be
            None.
    """
    *biases, dtype = bias_and_dtype
    bias = biases[0].to(dtype) if biases and biases[0] is not None else None
    return torch.nn.functional.linear(tokens.to(dtype), weight.to(dtype), bias)


PATCH = no_te_patch(
    "router_gate",
    "the router's gate calls a name that only Transformer Engine's import defines",
    Replacement(
        "megatron.core.transformer.moe.router:router_gating_linear",
        lambda _: compute_router_logits,
        before=Version("0.17.0rc0"),
    ),
)
