import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from parakit.accounting.collect import RankRecord, collect_rank_records
from parakit.accounting.routing import RoutingLog, record_routing
from parakit.artifacts import run as records
from parakit.artifacts.measurements import (
    LayerRouting,
    RankCommunication,
    RankRouting,
    RankTime,
    RoutingRecord,
    read_measurements,
)

CHOSEN = torch.tensor([[True, True, False], [True, False, True]])


@pytest.fixture
def ledger() -> Iterator[RoutingLog]:
    ledger = RoutingLog(kept_iterations=4)
    ledger.install()
    yield ledger
    RoutingLog.installed = None


def rows(ledger: RoutingLog) -> tuple[LayerRouting, ...]:
    result = ledger.result(rank=0)
    assert result is not None
    return result.layers


def test_tokens_and_drops_add_up_over_micro_batches_and_losses_are_their_mean(
    ledger: RoutingLog,
) -> None:
    for loss in (1.0, 2.0):
        record_routing(
            1, torch.zeros(2, 3), CHOSEN, dropped=1, load_balancing_loss=torch.tensor(loss)
        )
    ledger.end_iteration(1)
    (row,) = rows(ledger)
    assert (row.iteration, row.layer) == (1, 1)
    assert (row.tokens_per_expert, row.dropped_tokens) == ((4, 2, 2), 2)
    assert row.load_balancing_loss == pytest.approx(1.5)


def test_uniform_router_has_the_maximum_entropy(ledger: RoutingLog) -> None:
    record_routing(1, torch.full((2, 3), 2.0), CHOSEN)
    ledger.end_iteration(1)
    (row,) = rows(ledger)
    assert row.entropy_nats == pytest.approx(math.log(3))
    # Every log-sum-exp is 2 + ln 3.
    assert row.z_loss == pytest.approx((2 + math.log(3)) ** 2)
    assert row.load_balancing_loss is None


def test_deterministic_router_has_zero_entropy(ledger: RoutingLog) -> None:
    record_routing(1, torch.tensor([[0.0, 100.0]]), torch.tensor([[False, True]]))
    ledger.end_iteration(1)
    assert rows(ledger)[0].entropy_nats == pytest.approx(0, abs=1e-30)


def test_routing_records_are_sorted_by_iteration_and_layer(ledger: RoutingLog) -> None:
    for iteration in (1, 2):
        for layer in (2, 1):
            record_routing(layer, torch.zeros(2, 3), CHOSEN)
        ledger.end_iteration(iteration)
    assert [(row.iteration, row.layer) for row in rows(ledger)] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(row.tokens_per_expert == (2, 1, 1) for row in rows(ledger))


def test_evaluation_is_not_counted(ledger: RoutingLog) -> None:
    with torch.no_grad():
        record_routing(1, torch.zeros(2, 3), CHOSEN)
    ledger.end_iteration(1)
    assert ledger.result(0) is None


def test_long_run_records_every_other_iteration(ledger: RoutingLog) -> None:
    for iteration in range(1, 10):
        record_routing(1, torch.zeros(2, 3), CHOSEN)
        ledger.end_iteration(iteration)
    assert [row.iteration for row in rows(ledger)] == [1, 5, 9]
    assert rows(ledger)[1].tokens_per_expert == (2, 1, 1)


def test_a_figure_that_is_not_finite_is_unknown(ledger: RoutingLog) -> None:
    record_routing(1, torch.full((2, 3), math.nan), CHOSEN)
    ledger.end_iteration(1)
    (row,) = rows(ledger)
    assert (row.z_loss, row.entropy_nats, row.tokens_per_expert) == (None, None, (2, 1, 1))


def test_routing_is_not_recorded_without_a_communication_log() -> None:
    record_routing(1, torch.zeros(2, 3), CHOSEN)


def rank_file(rank: int, rows: RankRouting | None) -> bytes:
    empty = RankCommunication(rank, 0, 0, ()), RankTime(rank, 0.0, {}, {})
    return msgspec.json.encode(RankRecord(rank, *empty, None, (), rows))


def test_ranks_are_gathered_into_one_file(tmp_path: Path) -> None:
    (tmp_path / records.LEDGER_FOLDER).mkdir()
    row = LayerRouting(1, 1, (3, 5), 0, None, 0.5, 0.69)
    for rank in (1, 0):
        file = tmp_path / records.LEDGER_FOLDER / f"rank{rank}.json"
        file.write_bytes(rank_file(rank, RankRouting(rank, (row,))))
    collect_rank_records(tmp_path)
    assert read_measurements(tmp_path, RoutingRecord) == RoutingRecord(
        (RankRouting(0, (row,)), RankRouting(1, (row,)))
    )


def test_dense_model_gets_no_routing_file(tmp_path: Path) -> None:
    (tmp_path / records.LEDGER_FOLDER).mkdir()
    (tmp_path / records.LEDGER_FOLDER / "rank0.json").write_bytes(rank_file(0, None))
    collect_rank_records(tmp_path)
    assert not (tmp_path / records.ROUTING_FILE).exists()
