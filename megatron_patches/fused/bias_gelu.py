"""Bias and GELU, compiled so that the bias gradient is summed in the pass that makes the input's.

Megatron's fusion (`--bias-gelu-fusion`, on by default) returns the whole input gradient once more as the
bias's, and autograd sums it in a kernel of its own, which reads it again. By default the compiler
uses two kernels too: a sum over all rows has too few columns to fill a GPU and is split. Summed over
`ROWS` rows at a time it is one kernel with the gradient, seen in the code that torch 2.11 makes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_patches.fused import compiled
from megatron_patches.registry import Replacement, fused_patch

ROWS = 128
"""Summed by one thread: 256 of them a column for 32,768 tokens."""


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh approximation, as Megatron's fusion) of x + bias; x [s, b, ffn], bias [ffn]."""
    result: Tensor = BiasGelu.apply(x, bias)
    return result


def gelu_of_sum(x: Tensor, bias: Tensor) -> Tensor:
    """The forward pass: [.., ffn] and [ffn] to [.., ffn]."""
    return torch.nn.functional.gelu(x + bias, approximate="tanh")


def gradients(upstream: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The input's gradient [g, r, ffn], and the bias's over r rows in fp32 (float64 stays) [g, ffn]."""
    into_x = torch.ops.aten.gelu_backward(upstream, x + bias, approximate="tanh")
    wide = into_x if into_x.dtype == torch.float64 else into_x.float()
    return into_x, wide.sum(1)


class BiasGelu(torch.autograd.Function):
    """Keeps its inputs between the passes, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        """GELU of the sum."""
        ctx.save_for_backward(x, bias)
        result: Tensor = compiled(gelu_of_sum)(x, bias)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the bias."""
        x, bias = ctx.saved_tensors
        shape = (-1, math.gcd(x.numel() // x.size(-1), ROWS), x.size(-1))
        into_x, partial = compiled(gradients)(upstream[0].reshape(shape), x.reshape(shape), bias)
        return into_x.view_as(x), partial.sum(0).to(bias.dtype)


PATCH = fused_patch(
    "bias_gelu",
    "the bias gradient of Megatron's fusion is summed by a kernel of its own",
    Replacement("megatron.core.transformer.mlp:bias_gelu_impl", lambda _: bias_gelu),
)
