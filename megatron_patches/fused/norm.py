"""Compile LayerNorm, forward and backward (`FUSED=norm`).

Target: `WrappedTorchNorm.__new__`, which makes Megatron's layer norm without Apex, a torch.nn.LayerNorm.
Its forward is one kernel already (`F.layer_norm`). Without the patch, backward takes one kernel for the
input and one or two for weight and bias, which read the same values again. The compiler of torch 2.11
makes one pass of backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_patches.fused import compile_once
from megatron_patches.registry import Replacement, fused_patch, wrap_original


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return x normalised over its last dimension, times weight plus bias, in the type of x.

    Shapes: x [s, b, h], weight and bias [h]. 16-bit inputs are computed in fp32.
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight + bias).to(x.dtype)


class CompiledLayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm whose arithmetic is compiled."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input normalised over its last dimension."""
        result: Tensor = compile_once(layer_norm)(input, self.weight, self.bias, self.eps)
        return result


def make_compiled_norm(norm: torch.nn.Module) -> torch.nn.Module:
    """Change the class of a LayerNorm to CompiledLayerNorm in place, and return the same module.

    A LayerNorm over several dimensions, a LayerNorm without bias, and any other norm are returned unchanged.
    """
    has_bias = type(norm) is torch.nn.LayerNorm and norm.bias is not None
    if has_bias and len(norm.normalized_shape) == 1:  # type: ignore[arg-type]
        norm.__class__ = CompiledLayerNorm
    return norm


@wrap_original
def _make_compiled(original: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Make a norm and return it compiled, if it can be."""
    return make_compiled_norm(original(*args, **kwargs))


PATCH = fused_patch(
    "norm",
    "torch's LayerNorm takes three kernels backward",
    Replacement("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", _make_compiled),
)
