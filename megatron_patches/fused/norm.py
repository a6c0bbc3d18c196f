"""LayerNorm compiled, forward and backward.

Without Apex Megatron's layer norm is `WrappedTorchNorm`, which is torch.nn.LayerNorm and so already one
kernel forward (`F.layer_norm`); its backward takes one for the input and one or two for weight and bias,
which read the same again. The compiler of torch 2.11 makes one pass of the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_patches.fused import compiled
from megatron_patches.registry import Replacement, around, fused_patch


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension in fp32, scale and shift; x [s, b, h], weight and bias [h]."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight + bias).to(x.dtype)


class CompiledLayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm whose arithmetic is compiled."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimension."""
        result: Tensor = compiled(layer_norm)(input, self.weight, self.bias, self.eps)
        return result


def recast(norm: torch.nn.Module) -> torch.nn.Module:
    """The same module, compiled if it is a LayerNorm over one dimension with weight and bias."""
    whole = type(norm) is torch.nn.LayerNorm and norm.bias is not None
    if whole and len(norm.normalized_shape) == 1:  # type: ignore[arg-type]
        norm.__class__ = CompiledLayerNorm
    return norm


@around
def _recasting(original: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
    return recast(original(*args, **kwargs))


PATCH = fused_patch(
    "norm",
    "torch's LayerNorm takes three kernels backward",
    Replacement("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", _recasting),
)
