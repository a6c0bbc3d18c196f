"""AdamW and gradient clipping as Megatron does them, over plain, sharded and split parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples.native.settings import Settings


def adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW whose weight decay spares biases and norms: all tensors of fewer than two dimensions."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=0.0, betas=(settings.adam_beta1, settings.adam_beta2), eps=1e-8
    )


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale all gradients so that their norm is at most `limit`; return the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = gradient_norm(gradients)
    factor = limit / (norm + 1.0e-6)
    if factor < 1.0:
        for gradient in gradients:
            _local(gradient).mul_(factor)
    return norm


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """Euclidean norm over all ranks' parts, each part once, summed in double precision."""
    parts = [0.0, 0.0]
    device = torch.device("cpu")
    for gradient in gradients:
        local = _local(gradient)
        device = local.device
        parts[_is_split(gradient)] += float(
            torch.linalg.vector_norm(local, dtype=torch.float64) ** 2
        )
    whole, split = parts
    if split:
        total = torch.tensor(split, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        split = float(total)
    return float((whole + split) ** 0.5)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _is_split(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(place.is_shard() for place in gradient.placements)
