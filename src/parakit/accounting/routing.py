"""Record the decisions of a rank's routers per iteration. A router reports them with one call.

Figures stay on the device until the end of the step. Then one copy brings those of all layers to the host.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from parakit.artifacts.measurements import LayerRouting, RankRouting

KEPT_ITERATIONS = 1024
"""The most iterations that are kept. Beyond, every other kept iteration is dropped, repeatedly."""


def record_routing(
    layer: int,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    *,
    dropped: torch.Tensor | int = 0,
    load_balancing_loss: torch.Tensor | None = None,
) -> None:
    """Add a router's decision for one micro batch to the routing log of this process, if there is one.

    A forward pass without gradients is not recorded, because it belongs to evaluation or will be recomputed.

    Args:
        layer: The layer's number in the whole model, from 1.
        logits: The router's logits before softmax. Shape [tokens, experts].
        chosen: True where the expert computes the token. Boolean, shape [tokens, experts].
        dropped: The number of token copies that were dropped because an expert's capacity was full.
        load_balancing_loss: The loss without its coefficient; None without such a loss. If ranks split a
            sequence, the mean of the ranks' values must be the loss.
    """
    log = RoutingLog.installed
    if log is not None and torch.is_grad_enabled():
        log.add(layer, _pack_figures(logits, chosen, dropped, load_balancing_loss))


class RoutingLog:
    """The routing of one rank: sums over the micro batches of the present iteration, and records of past iterations."""

    installed: ClassVar[RoutingLog | None] = None
    """The log that the routers of this process report to; None if routing is not recorded."""

    def __init__(self, kept_iterations: int = KEPT_ITERATIONS) -> None:
        self._kept_iterations = kept_iterations
        self._stride = 1
        self._sums: dict[int, torch.Tensor] = {}
        self._micro_batches: dict[int, int] = {}
        self._rows: dict[int, tuple[LayerRouting, ...]] = {}

    def install(self) -> None:
        """Let the routers of this process report to this log."""
        RoutingLog.installed = self

    def add(self, layer: int, figures: torch.Tensor) -> None:
        """Add the figures of one micro batch of a layer, as `_pack_figures` arranges them."""
        sums = self._sums.get(layer)
        self._sums[layer] = figures if sums is None else sums + figures
        self._micro_batches[layer] = self._micro_batches.get(layer, 0) + 1

    def end_iteration(self, iteration: int) -> None:
        """Store the sums over the micro batches as the record of iteration `iteration`, and reset the sums.

        If there are more records than the limit, every other record is dropped. From then on, an iteration is
        stored half as often.
        """
        if self._sums and (iteration - 1) % self._stride == 0:
            layers = sorted(self._sums)
            sums_by_layer = torch.stack([self._sums[layer] for layer in layers]).tolist()
            self._rows[iteration] = tuple(
                _make_record(iteration, layer, sums, self._micro_batches[layer])
                for layer, sums in zip(layers, sums_by_layer, strict=True)
            )
        self._sums.clear()
        self._micro_batches.clear()
        if len(self._rows) > self._kept_iterations:
            self._stride *= 2
            self._rows = {
                number: rows
                for number, rows in self._rows.items()
                if (number - 1) % self._stride == 0
            }

    def result(self, rank: int) -> RankRouting | None:
        """Return all kept records; None if no router reported."""
        rows = tuple(row for rows_of_iteration in self._rows.values() for row in rows_of_iteration)
        return RankRouting(rank, rows) if rows else None


@torch.no_grad()
def _pack_figures(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    dropped: torch.Tensor | int,
    load_balancing_loss: torch.Tensor | None,
) -> torch.Tensor:
    """Return the figures of one micro batch as an fp64 tensor of shape [experts + 5].

    The entries are tokens per expert, dropped copies, 1 if there is a loss, the loss, z-loss and entropy.
    """
    logits = logits.detach().float()
    log_probabilities = torch.log_softmax(logits, dim=-1)
    has_loss = load_balancing_loss is not None
    scalars = (
        dropped,
        float(has_loss),
        load_balancing_loss.detach() if load_balancing_loss is not None else 0.0,
        torch.logsumexp(logits, dim=-1).square().mean(),
        -(log_probabilities.exp() * log_probabilities).sum(dim=-1).mean(),
    )
    tokens = chosen.detach().sum(dim=0).double()
    scalar_tensors = [
        torch.as_tensor(scalar, dtype=torch.float64, device=tokens.device).reshape(())
        for scalar in scalars
    ]
    return torch.cat((tokens, torch.stack(scalar_tensors)))


def _make_record(iteration: int, layer: int, sums: list[float], micro_batches: int) -> LayerRouting:
    """Return the record of a layer: sums of tokens, and means of losses and entropy per micro batch."""
    *tokens, dropped, num_losses, loss, z_loss, entropy = sums
    return LayerRouting(
        iteration=iteration,
        layer=layer,
        tokens_per_expert=tuple(map(round, tokens)),
        dropped_tokens=round(dropped),
        load_balancing_loss=_finite_or_none(loss / num_losses) if num_losses else None,
        z_loss=_finite_or_none(z_loss / micro_batches),
        entropy_nats=_finite_or_none(entropy / micro_batches),
    )


def _finite_or_none(value: float) -> float | None:
    """Return the value; None for NaN and infinity, which JSON cannot hold."""
    return value if math.isfinite(value) else None
