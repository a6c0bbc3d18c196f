import pytest

from parakit.accounting.communication import Call, CommunicationLog, ObservedCall
from parakit.accounting.timeline import HostClock, Span
from parakit.costs.operations import Operation, Phase

REDUCE = Call("tp", 2, Operation.ALL_REDUCE, Phase.FORWARD, "float32", 400, None)
GATHER = Call("tp", 2, Operation.ALL_GATHER, Phase.FORWARD, "float32", 800, None)
CLOCK = HostClock()


def iteration(ledger: CommunicationLog, *calls: ObservedCall, seconds: int = 1) -> None:
    ledger.observed_calls.extend(calls)
    ledger.end_iteration({Phase.FORWARD: seconds * 10**9}, CLOCK)


def test_the_most_frequent_kind_of_iteration_is_the_steady_one() -> None:
    ledger = CommunicationLog()
    iteration(ledger, ObservedCall(GATHER, 0, 1))
    for _ in range(2):
        iteration(ledger, ObservedCall(REDUCE, 0, 1), ObservedCall(REDUCE, 1, 2))
    communication = ledger.steady_communication(0)
    assert (communication.steady_iterations, communication.other_iterations) == (2, 1)
    assert [(row.operation, row.calls, row.wire_bytes) for row in communication.calls] == [
        (Operation.ALL_REDUCE, 2, 800)
    ]


def test_waiting_time_is_counted_in_its_phase_and_separately_from_transfer_time() -> None:
    ledger = CommunicationLog()
    later = (Phase.OPTIMIZER, 700_000_000, 900_000_000)
    iteration(ledger, ObservedCall(REDUCE, 0, 100_000_000, [later]))
    (row,) = ledger.steady_communication(0).calls
    assert row.wait_seconds == pytest.approx(0.1 + 0.2)
    assert row.transfer_seconds == pytest.approx(0.9)
    time = ledger.steady_time(0)
    assert time.communication_seconds == pytest.approx({Phase.FORWARD: 0.1, Phase.OPTIMIZER: 0.2})
    assert time.iteration_seconds == pytest.approx(1)


def test_means_are_over_steady_iterations() -> None:
    ledger = CommunicationLog()
    iteration(ledger, ObservedCall(REDUCE, 0, 2_000_000_000), seconds=1)
    iteration(ledger, ObservedCall(REDUCE, 0, 4_000_000_000), seconds=3)
    assert ledger.steady_communication(0).calls[0].wait_seconds == pytest.approx(3)
    assert ledger.steady_time(0).iteration_seconds == pytest.approx(2)


def test_span_ends_when_the_result_is_available() -> None:
    ledger = CommunicationLog()
    ledger.observed_calls += [
        ObservedCall(REDUCE, 1, 2, [(Phase.FORWARD, 5, 8)]),
        ObservedCall(GATHER, 3, 4),
    ]
    assert list(ledger.call_spans(CLOCK)) == [
        Span("all_reduce tp", "communication", 1, 8),
        Span("all_gather tp", "communication", 3, 4),
    ]


def test_run_without_complete_iteration_has_no_calls_and_no_time() -> None:
    ledger = CommunicationLog()
    ledger.observed_calls.append(ObservedCall(REDUCE, 0, 1))
    ledger.drop_calls()
    assert ledger.steady_communication(3).calls == ()
    assert ledger.steady_time(3).iteration_seconds == 0


def routed(rows: int, sent: int) -> ObservedCall:
    """Record an all-to-all of rows of 8 bytes."""
    call = Call("ep", 2, Operation.ALL_TO_ALL, Phase.FORWARD, "float32", 8 * rows, sent)
    return ObservedCall(call._replace(row_bytes=8), 0, 1)


def test_iterations_that_differ_only_in_routed_bytes_are_of_the_same_kind() -> None:
    ledger = CommunicationLog()
    iteration(ledger, routed(10, 32), routed(6, 16), ObservedCall(REDUCE, 0, 1))
    iteration(ledger, routed(10, 40), routed(14, 24), ObservedCall(REDUCE, 0, 1))
    communication = ledger.steady_communication(0)
    assert (communication.steady_iterations, communication.other_iterations) == (2, 0)
    assert [
        (row.group, row.calls, row.payload_bytes, row.wire_bytes) for row in communication.calls
    ] == [
        ("ep", 2, 8 * 10, (32 + 16 + 40 + 24) // 2),
        ("tp", 1, 400, 400),
    ]


def test_rows_of_another_length_are_other_calls() -> None:
    ledger = CommunicationLog()
    wide = routed(10, 0).call._replace(row_bytes=16)
    iteration(ledger, routed(10, 0), ObservedCall(wide, 0, 1))
    assert [row.calls for row in ledger.steady_communication(0).calls] == [1, 1]


def test_calls_that_differ_only_in_size_are_listed_in_their_order_of_execution() -> None:
    ledger = CommunicationLog()
    sizes = [4 * (37 * index % 23) for index in range(23)]
    iteration(ledger, *(ObservedCall(REDUCE._replace(payload_bytes=size), 0, 1) for size in sizes))
    assert [row.payload_bytes for row in ledger.steady_communication(0).calls] == sizes


def test_later_of_equally_frequent_kinds_of_iterations_is_steady() -> None:
    ledger = CommunicationLog()
    iteration(ledger, ObservedCall(GATHER, 0, 1))
    iteration(ledger, ObservedCall(REDUCE, 0, 1))
    assert [row.operation for row in ledger.steady_communication(0).calls] == [Operation.ALL_REDUCE]


def test_slowed_iteration_counts_for_calls_but_not_for_time() -> None:
    ledger = CommunicationLog()
    iteration(ledger, ObservedCall(REDUCE, 0, 2_000_000_000), seconds=1)
    ledger.observed_calls.append(ObservedCall(REDUCE, 0, 90_000_000_000))
    ledger.end_untimed_iteration()
    communication = ledger.steady_communication(0)
    assert (
        communication.steady_iterations,
        communication.calls[0].calls,
        communication.calls[0].wire_bytes,
    ) == (2, 1, 400)
    assert communication.calls[0].wait_seconds == pytest.approx(2)
    assert ledger.steady_time(0).iteration_seconds == pytest.approx(1)
