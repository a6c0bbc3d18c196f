from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patches.routing import record_decision, record_drops, record_loss
from parakit.accounting.routing import RoutingLog
from parakit.artifacts.measurements import LayerRouting

LOGITS = torch.zeros(2, 1, 3)
CHOSEN = torch.tensor([[True, True, False], [True, False, True]])


@pytest.fixture
def ledger() -> Iterator[RoutingLog]:
    ledger = RoutingLog()
    ledger.install()
    yield ledger
    RoutingLog.installed = None


class Router:
    """Router that calls its parts in the order of Megatron's TopKRouter."""

    training = True
    layer_number = 3

    def __init__(self, *, kept: torch.Tensor | None = None, loss: float = 0) -> None:
        self._kept, self._loss = kept, loss
        self._drop = record_drops(lambda probabilities, chosen: (probabilities, kept))
        self._attach = record_loss(lambda router, activation, *_: activation)

    def routing(self, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities, chosen = torch.rand(2, 3), CHOSEN
        if self._kept is not None:
            probabilities, chosen = self._drop(probabilities, chosen)
        if self._loss:
            group = SimpleNamespace(size=lambda: 2)
            loss = torch.tensor(0.01 * self._loss)
            self._attach(self, probabilities, 0.01, loss, "load_balancing_loss", group)
        return probabilities, chosen


def route(ledger: RoutingLog, **parts: Any) -> LayerRouting:
    router = Router(**parts)
    record_decision(Router.routing)(router, LOGITS)
    ledger.end_iteration(1)
    result = ledger.result(0)
    assert result is not None
    (row,) = result.layers
    return row


def test_dropless_router_reports_chosen_experts_per_layer(ledger: RoutingLog) -> None:
    row = route(ledger)
    assert (row.layer, row.tokens_per_expert, row.dropped_tokens) == (3, (2, 1, 1), 0)
    assert row.load_balancing_loss is None


def test_tokens_beyond_the_capacity_count_as_dropped_and_padding_does_not_count(
    ledger: RoutingLog,
) -> None:
    padded = torch.tensor([[True, False, True], [False, False, True]])
    row = route(ledger, kept=padded)
    assert (row.tokens_per_expert, row.dropped_tokens) == ((1, 0, 1), 2)


def test_loss_share_of_a_rank_is_scaled_for_averaging_over_ranks(ledger: RoutingLog) -> None:
    assert route(ledger, loss=0.5).load_balancing_loss == pytest.approx(1.0)


def test_evaluation_is_not_reported(ledger: RoutingLog) -> None:
    router = Router()
    router.training = False
    record_decision(Router.routing)(router, LOGITS)
    ledger.end_iteration(1)
    assert ledger.result(0) is None
