"""Rotary position embedding (arXiv 2104.09864), its two halves side by side as in Megatron."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, base: int) -> Tensor:
    """Turn queries or keys, [batch, heads, sequence, width], by their positions; width is even."""
    length, width = x.shape[-2:]
    powers = torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width
    places = torch.arange(length, dtype=torch.float32, device=x.device)
    angles = torch.outer(places, base**-powers).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * angles.cos() + turned * angles.sin()).to(x.dtype)
