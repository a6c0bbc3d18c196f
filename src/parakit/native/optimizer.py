"""The update as Megatron makes it: AdamW or Muon, gradient clipping, the learning rate's schedule.

Parameters may be plain, sharded or split. Muon is PyTorch's own (`torch.optim.Muon`, from 2.9) as
published by Keller Jordan: Nesterov momentum, five Newton–Schulz steps with (3.4445, −4.7750, 2.0315) in
bf16, and an update scaled by √max(1, rows/columns).
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parakit.capturing import local_tensor
from parakit.native.parallel import COPIES_ATTRIBUTE
from parakit.native.settings import Settings

RATE_FRACTION = "rate"
"""Key of a parameter group: its rate as a share of the schedule's."""


def build_adamw(parameters: Iterable[nn.Parameter], settings: Settings) -> torch.optim.AdamW:
    """AdamW at Megatron's defaults; biases and norms, of fewer than two dimensions, do not decay."""
    own = list(parameters)
    groups = [
        {"params": [p for p in own if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in own if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(settings.adam_beta1, settings.adam_beta2))


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale all gradients so that their norm is at most `limit`; return the norm before."""
    trained = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(trained)
    factor = limit / (norm + 1.0e-6)
    if 0 < factor < 1.0:  # A limit of 0 is none, as Megatron has it.
        for parameter in trained:
            _gradient(parameter).mul_(factor)
    return norm


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Euclidean norm over all ranks' gradients, each part once, summed in double precision."""
    whole, parts = 0.0, None
    for parameter in parameters:
        own = _gradient(parameter)
        square = float(torch.linalg.vector_norm(own, dtype=torch.float64) ** 2)
        if copies := _ranks_with_it(parameter):
            if parts is None:
                parts = torch.zeros((), dtype=torch.float64, device=own.device)
            parts += square / copies
        else:
            whole += square
    if parts is not None:
        dist.all_reduce(parts)
        whole += float(parts)
    return float(whole**0.5)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local_tensor(parameter.grad)


def _ranks_with_it(parameter: nn.Parameter) -> int:
    """Ranks that hold the same part; 0 where every rank holds the whole."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        return int(any(place.is_shard() for place in gradient.placements))
    return int(getattr(parameter, COPIES_ATTRIBUTE, 0))


class MuonAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for the rest, behind one list of parameter groups."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._parts = (muon, adamw)
        # The groups and the state are the parts' own, not copies.
        self.param_groups = [*muon.param_groups, *adamw.param_groups]
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        muon.state = adamw.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        """Both updates."""
        for part in self._parts:
            part.step()


def muon_adamw(model: nn.Module, settings: Settings) -> MuonAdamW:
    """Muon at `--lr` without weight decay, AdamW at `--decoupled-lr` with `--weight-decay`.

    `--muon-rule megatron` makes Megatron's choices instead. Exits with a sentence where this PyTorch has
    no Muon.
    """
    if settings.muon_rule == "megatron":
        return _megatron_muon(model, settings)
    if not hasattr(torch.optim, "Muon"):
        sys.exit(f"torch {torch.__version__} has no Muon, 2.9 has; use OPTIMIZER=adamw.")
    hidden = muon_parameters(model)
    muon = torch.optim.Muon(
        hidden,
        lr=0.0,
        weight_decay=0.0,
        momentum=settings.muon_momentum,
        nesterov=True,
        adjust_lr_fn="original",
    )
    chosen = set(map(id, hidden))
    rest = build_adamw((p for p in model.parameters() if id(p) not in chosen), settings)
    for group in rest.param_groups:
        group[RATE_FRACTION] = settings.adamw_rate
    return MuonAdamW(muon, rest)


def _megatron_muon(model: nn.Module, settings: Settings) -> MuonAdamW:
    """As `megatron.core.optimizer.emerging_optimizers` has it in 0.19.

    Muon decays its matrices, and position embeddings are among them; norms and biases are AdamW's at
    Muon's rate, only the two ends of the vocabulary have the decoupled one.
    """
    from emerging_optimizers.orthogonalized_optimizers import Muon  # type: ignore[import-untyped]

    vocabulary = {"word_embeddings", "output_layer"}  # DDP puts `module` before their names.
    ends = [p for name, p in model.named_parameters() if vocabulary & set(name.split("."))]
    known = set(map(id, ends))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    muon = Muon(
        [parameter for parameter in rest if parameter.dim() == 2],
        lr=0.0,
        momentum=settings.muon_momentum,
        weight_decay=settings.weight_decay,
        nesterov=True,
        fp32_matmul_prec=settings.muon_fp32_matmul_prec,
        coefficient_type="simple",
        num_ns_steps=5,
        scale_mode="shape_scaling",
    )
    others = build_adamw([*ends, *(p for p in rest if p.dim() != 2)], settings)
    others.param_groups[0][RATE_FRACTION] = settings.adamw_rate
    return MuonAdamW(muon, others)


def muon_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Every matrix but embeddings and the output layer; routers are included."""
    outside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    outside |= {id(p) for name, p in model.named_parameters() if "output_layer" in name}
    return [p for p in model.parameters() if p.dim() == 2 and id(p) not in outside]


def learning_rate(settings: Settings, updates: int) -> float:
    """The rate after `updates` updates: linear warm-up, then decay, counted in samples as in Megatron.

    Megatron's first update is made with the rate of 0 updates.
    """
    decay_steps = settings.lr_decay_iters * settings.global_batch_size
    warmup_steps = settings.lr_warmup_fraction * decay_steps
    steps = updates * settings.global_batch_size
    if warmup_steps > 0 and steps <= warmup_steps:
        return settings.lr * steps / warmup_steps
    if settings.lr_decay_style == "constant":
        return settings.lr
    if steps > decay_steps:
        return settings.min_lr
    done = (steps - warmup_steps) / (decay_steps - warmup_steps)
    linear = settings.lr_decay_style == "linear"
    left = 1 - done if linear else 0.5 * (math.cos(math.pi * done) + 1)
    return settings.min_lr + left * (settings.lr - settings.min_lr)
