"""The router's gate where Transformer Engine is missing.

Up to 0.16 Megatron's gate calls a name that only an import of Transformer Engine defines, and stops with
`name 'te_general_gemm' is not defined`.
"""

from __future__ import annotations

from typing import Any

import torch
from packaging.version import Version

from megatron_patches.registry import Replacement, no_te_patch


def gate(tokens: torch.Tensor, weight: torch.Tensor, *bias_and_dtype: Any) -> torch.Tensor:
    """The router's logits in its own dtype; shapes [.., hidden], [experts, hidden] to [.., experts].

    From 0.15.0 on Megatron passes a bias between weight and dtype.
    """
    *biases, dtype = bias_and_dtype
    bias = biases[0].to(dtype) if biases and biases[0] is not None else None
    return torch.nn.functional.linear(tokens.to(dtype), weight.to(dtype), bias)


PATCH = no_te_patch(
    "router_gate",
    "the router's gate calls a name that only Transformer Engine's import defines",
    Replacement(
        "megatron.core.transformer.moe.router:router_gating_linear",
        lambda _: gate,
        before=Version("0.17.0rc0"),
    ),
)
