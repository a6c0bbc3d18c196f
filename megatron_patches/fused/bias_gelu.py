"""Add bias and apply GELU so that backward sums the bias gradient in one pass (`FUSED=bias_gelu`).

Target: `bias_gelu_impl` of `megatron.core.transformer.mlp` (`--bias-gelu-fusion`, on by default). Megatron's
fusion returns the full input gradient a second time as the bias's. Without the patch, autograd sums it in
a kernel of its own, which reads it again. torch's compiler would by default use two kernels as well: a sum
over all rows has too few columns to fill a GPU and is split. Summed over `ROWS` rows at a time, sum and
gradient are one kernel, as the code shows that torch 2.11 generates.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_patches.fused import compile_once
from megatron_patches.registry import Replacement, fused_patch

ROWS = 128
"""Number of rows that one thread sums. With 32,768 tokens, 256 threads work on each column."""


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return GELU of x + bias, [s, b, ffn]; x is [s, b, ffn], bias [ffn].

    GELU is the tanh approximation, the same as in Megatron's fusion.
    """
    result: Tensor = BiasGelu.apply(x, bias)
    return result


def gelu_of_sum(x: Tensor, bias: Tensor) -> Tensor:
    """Return GELU of x + bias, [.., ffn]; this is the function that is compiled for forward."""
    return torch.nn.functional.gelu(x + bias, approximate="tanh")


def gradients(upstream: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and that of the bias summed over each group of rows.

    Args:
        upstream: Gradient of the result, [groups, rows, ffn].
        x: Input, [groups, rows, ffn].
        bias: Bias, [ffn].

    Returns:
        The gradient of x, [groups, rows, ffn], and partial sums of the bias gradient, [groups, ffn], in
        fp32 or float64.
    """
    x_gradient = torch.ops.aten.gelu_backward(upstream, x + bias, approximate="tanh")
    wide = x_gradient if x_gradient.dtype == torch.float64 else x_gradient.float()
    return x_gradient, wide.sum(1)


class BiasGelu(torch.autograd.Function):
    """GELU of x + bias, which stores only its inputs for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        """Return GELU of x + bias."""
        ctx.save_for_backward(x, bias)
        result: Tensor = compile_once(gelu_of_sum)(x, bias)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the bias, in their types."""
        x, bias = ctx.saved_tensors
        shape = (-1, math.gcd(x.numel() // x.size(-1), ROWS), x.size(-1))
        x_gradient, partial_sums = compile_once(gradients)(
            upstream[0].reshape(shape), x.reshape(shape), bias
        )
        return x_gradient.view_as(x), partial_sums.sum(0).to(bias.dtype)


PATCH = fused_patch(
    "bias_gelu",
    "the bias gradient of Megatron's fusion is summed by a kernel of its own",
    Replacement("megatron.core.transformer.mlp:bias_gelu_impl", lambda _: bias_gelu),
)
