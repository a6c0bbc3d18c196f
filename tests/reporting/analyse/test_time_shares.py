from dataclasses import replace

import pytest

from parakit.artifacts.measurements import CommunicationRecord, RankCommunication, TimeRecord
from parakit.costs.operations import Phase
from parakit.logs.sources import read_time_ledger
from parakit.reporting.analyse.time_shares import add_pipeline_waits, compute_time_shares
from tests.reporting.ledger_factory import call, seconds

PHASES = {
    Phase.FORWARD: 0.2,
    Phase.BACKWARD: 0.3,
    Phase.GRADIENT_SYNC: 0.1,
    Phase.OPTIMIZER: 0.2,
    Phase.PIPELINE: 0.1,
    Phase.OTHER: 0.1,
}
CALLS = {Phase.GRADIENT_SYNC: 0.1, Phase.FORWARD: 0.15, Phase.PIPELINE: 0.1, Phase.OTHER: 0.08}


def test_shares_are_of_the_iteration_and_sum_to_one() -> None:
    (shares,) = compute_time_shares(TimeRecord((seconds(0, PHASES, CALLS),)))
    assert shares.phases[Phase.BACKWARD] == pytest.approx(0.3)
    assert sum(shares.phases.values()) == pytest.approx(1)
    assert shares.phases[Phase.PIPELINE] == pytest.approx(0.1)
    assert shares.exposed_communication == pytest.approx(0.43)


def test_published_form_counts_gradient_sync_as_backward_and_leaves_out_waiting() -> None:
    (shares,) = compute_time_shares(TimeRecord((seconds(0, PHASES),)))
    assert shares.published_fractions == pytest.approx((0.25, 0.5, 0.25))


def test_rank_without_a_steady_iteration_has_no_shares() -> None:
    assert compute_time_shares(TimeRecord((seconds(0, {}),))) == ()


def sent(wait: float, group: str = "pp") -> CommunicationRecord:
    message = replace(call(group, "send", 8), wait_seconds=wait)
    return CommunicationRecord((RankCommunication(0, 9, 0, (message,)),))


def test_messages_waited_for_outside_their_timers_are_pipeline_waits() -> None:
    times = TimeRecord((seconds(0, PHASES, CALLS),))
    (rank,) = add_pipeline_waits(times, sent(0.15)).ranks
    assert rank.phase_seconds[Phase.PIPELINE] == pytest.approx(0.15)
    assert rank.phase_seconds[Phase.OTHER] == pytest.approx(0.05)
    assert rank.communication_seconds[Phase.OTHER] == pytest.approx(0.03)
    assert sum(rank.phase_seconds.values()) == pytest.approx(rank.iteration_seconds)


def test_never_more_is_moved_than_was_waited_there() -> None:
    (rank,) = add_pipeline_waits(TimeRecord((seconds(0, PHASES, CALLS),)), sent(9.0)).ranks
    assert rank.phase_seconds[Phase.PIPELINE] == pytest.approx(0.18)


@pytest.mark.parametrize("record", [None, sent(0.1), sent(9.0, "cp")])
def test_waits_inside_the_timers_and_those_of_a_ring_stay(
    record: CommunicationRecord | None,
) -> None:
    times = TimeRecord((seconds(0, PHASES, CALLS),))
    assert add_pipeline_waits(times, record) == times


def test_missing_and_damaged_ledgers_are_a_reason(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert read_time_ledger(tmp_path) == (None, "no time.json")
    (tmp_path / "time.json").write_text('{"ranks": 3}')
    record, reason = read_time_ledger(tmp_path)
    assert record is None
    assert reason.startswith("time.json cannot be used (")
