"""What a rank's routers decide, iteration by iteration: a router reports with one call.

Figures stay on the device until the step's end, when one copy brings those of all layers to the host.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from parakit.artifacts.measurements import LayerRouting, RankRouting

KEPT_ITERATIONS = 1024
"""With more, every other one is dropped, and from then on the distance between kept ones doubles."""


def record_routing(
    layer: int,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    *,
    dropped: torch.Tensor | int = 0,
    load_balancing_loss: torch.Tensor | None = None,
) -> None:
    """Report to the ledger, if there is one, what a router decided for one micro batch.

    Evaluation and a forward that will be recomputed, both without gradients, are not counted.

    Args:
        layer: From 1, over the whole model.
        logits: The router's, before softmax. Shape [tokens, experts].
        chosen: Which expert computes which token. Boolean, shape [tokens, experts].
        dropped: Copies of tokens that capacity left out.
        load_balancing_loss: Before its coefficient; where ranks split a sequence, such that the
            mean over them is the loss.
    """
    ledger = RoutingLog.installed
    if ledger is not None and torch.is_grad_enabled():
        ledger.add(layer, _figures(logits, chosen, dropped, load_balancing_loss))


class RoutingLog:
    """Sums a rank's routing over micro batches and keeps it by iteration."""

    installed: ClassVar[RoutingLog | None] = None
    """The ledger that this process' routers report to."""

    def __init__(self, kept_iterations: int = KEPT_ITERATIONS) -> None:
        self._kept_iterations = kept_iterations
        self._stride = 1
        self._sums: dict[int, torch.Tensor] = {}
        self._micro_batches: dict[int, int] = {}
        self._rows: dict[int, tuple[LayerRouting, ...]] = {}

    def install(self) -> None:
        """Let this process' routers report here."""
        RoutingLog.installed = self

    def add(self, layer: int, figures: torch.Tensor) -> None:
        """Add one micro batch's figures of a layer."""
        before = self._sums.get(layer)
        self._sums[layer] = figures if before is None else before + figures
        self._micro_batches[layer] = self._micro_batches.get(layer, 0) + 1

    def end_iteration(self, iteration: int) -> None:
        """Keep what was added since the last iteration ended."""
        if self._sums and (iteration - 1) % self._stride == 0:
            layers = sorted(self._sums)
            figures = torch.stack([self._sums[layer] for layer in layers]).tolist()
            self._rows[iteration] = tuple(
                _row(iteration, layer, own, self._micro_batches[layer])
                for layer, own in zip(layers, figures, strict=True)
            )
        self._sums.clear()
        self._micro_batches.clear()
        if len(self._rows) > self._kept_iterations:
            self._stride *= 2
            self._rows = {i: row for i, row in self._rows.items() if (i - 1) % self._stride == 0}

    def result(self, rank: int) -> RankRouting | None:
        """All that was kept; None where no router reported."""
        rows = tuple(row for iteration in self._rows.values() for row in iteration)
        return RankRouting(rank, rows) if rows else None


@torch.no_grad()
def _figures(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    dropped: torch.Tensor | int,
    load_balancing_loss: torch.Tensor | None,
) -> torch.Tensor:
    """Tokens of each expert, dropped, losses (0 or 1), loss, z-loss, entropy; fp64, [experts + 5]."""
    logits = logits.detach().float()
    log_shares = torch.log_softmax(logits, dim=-1)
    has_loss = load_balancing_loss is not None
    numbers = (
        dropped,
        float(has_loss),
        load_balancing_loss.detach() if load_balancing_loss is not None else 0.0,
        torch.logsumexp(logits, dim=-1).square().mean(),
        -(log_shares.exp() * log_shares).sum(dim=-1).mean(),
    )
    tokens = chosen.detach().sum(dim=0).double()
    others = [torch.as_tensor(n, dtype=torch.float64, device=tokens.device) for n in numbers]
    return torch.cat((tokens, torch.stack([number.reshape(()) for number in others])))


def _row(iteration: int, layer: int, sums: list[float], micro_batches: int) -> LayerRouting:
    *tokens, dropped, losses, loss, z_loss, entropy = sums
    return LayerRouting(
        iteration=iteration,
        layer=layer,
        tokens_per_expert=tuple(map(round, tokens)),
        dropped_tokens=round(dropped),
        load_balancing_loss=_finite(loss / losses) if losses else None,
        z_loss=_finite(z_loss / micro_batches),
        entropy_nats=_finite(entropy / micro_batches),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
