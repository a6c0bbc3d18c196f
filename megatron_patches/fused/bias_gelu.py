"""Bias and GELU in one compiled function.

Megatron's fusion (`--bias-gelu-fusion`, on by default) compiles forward and backward apart and returns
the whole input gradient once more as the bias's, which autograd then sums in a kernel of its own. Traced
together with its backward, that sum is part of the pass that computes the input gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_patches.registry import Patch, Replacement


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh approximation, as Megatron's fusion) of x + bias; x [s, b, ffn], bias [ffn]."""
    return torch.nn.functional.gelu(x + bias, approximate="tanh")


PATCH = Patch(
    name="fused bias_gelu",
    reason="the bias gradient of Megatron's fusion is summed by a kernel of its own",
    needed=lambda situation: "bias_gelu" in situation.fused,
    replacements=(
        Replacement(
            "megatron.core.transformer.mlp:bias_gelu_impl", lambda _: torch.compile(bias_gelu)
        ),
    ),
)
