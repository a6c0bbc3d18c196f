"""Muon for hidden matrices, AdamW for the rest, behind one set of parameter groups.

Muon is PyTorch's own (`torch.optim.Muon`, from 2.9) as published by Keller Jordan: Nesterov momentum,
five Newton–Schulz steps with (3.4445, −4.7750, 2.0315) in bf16, and an update scaled by
√max(1, rows/columns).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from examples.native.optimizer import adam_groups
from examples.native.settings import Settings

RATE = "rate"
"""Key of a parameter group: its rate as a share of the schedule's."""


class MuonAdamW(torch.optim.Optimizer):
    """Both optimizers; each keeps its own groups, whose rates follow one schedule."""

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

    Exits with a sentence where this PyTorch has no Muon.
    """
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
    rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    adamw = torch.optim.AdamW(
        adam_groups(rest, settings), lr=0.0, betas=(settings.adam_beta1, settings.adam_beta2)
    )
    for group in adamw.param_groups:
        group[RATE] = settings.decoupled_lr / settings.lr
    return MuonAdamW(muon, adamw)


def muon_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Every matrix but embeddings and the output layer; routers are matrices like others."""
    outside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    outside |= {id(p) for name, p in model.named_parameters() if "output_layer" in name}
    return [p for p in model.parameters() if p.dim() == 2 and id(p) not in outside]
