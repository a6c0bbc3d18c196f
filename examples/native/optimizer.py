"""AdamW and gradient clipping as Megatron does them, over plain, sharded and split parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples.native.expert_parallel import COPIES
from examples.native.settings import Settings


def adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW at Megatron's defaults."""
    return torch.optim.AdamW(
        adam_groups(list(model.parameters()), settings),
        lr=0.0,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=1e-8,
    )


def adam_groups(parameters: Sequence[nn.Parameter], settings: Settings) -> list[dict[str, Any]]:
    """Weight decay spares biases and norms: all tensors of fewer than two dimensions."""
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale all gradients so that their norm is at most `limit`; return the norm before."""
    trained = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(trained)
    factor = limit / (norm + 1.0e-6)
    if factor < 1.0:
        for parameter in trained:
            _gradient(parameter).mul_(factor)
    return norm


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Euclidean norm over all ranks' gradients, each part once, summed in double precision."""
    whole, parts = 0.0, None
    for parameter in parameters:
        local = _gradient(parameter)
        square = float(torch.linalg.vector_norm(local, dtype=torch.float64) ** 2)
        if copies := _ranks_with_it(parameter):
            parts = (
                torch.zeros((), dtype=torch.float64, device=local.device)
                if parts is None
                else parts
            )
            parts += square / copies
        else:
            whole += square
    if parts is not None:
        dist.all_reduce(parts)
        whole += float(parts)
    return float(whole**0.5)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _ranks_with_it(parameter: nn.Parameter) -> int:
    """How many ranks hold the same part; 0 where every rank holds the whole."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        return int(any(place.is_shard() for place in gradient.placements))
    return int(getattr(parameter, COPIES, 0))
