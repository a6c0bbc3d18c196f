from collections.abc import Iterable

import pytest

from parakit.accounting.timeline import Span, Timeline, TimeMark, phase_of_timer
from parakit.costs.operations import Phase


class Scripted:
    """Clock that returns the given times in turn."""

    def __init__(self, times: Iterable[int]) -> None:
        self._times = iter(times)
        self.settled = 0

    def now(self) -> TimeMark:
        return next(self._times)

    def synchronize(self) -> None:
        self.settled += 1

    def to_nanoseconds(self, mark: TimeMark) -> int:
        return int(mark)


def timeline(*times: int) -> Timeline:
    made = Timeline()
    made.use_clock(Scripted(times))
    return made


def test_a_span_does_not_count_the_spans_inside_it() -> None:
    line = timeline(0, 1, 3, 7, 10, 12)
    line.begin("forward-compute")
    line.begin("forward-recv")
    assert line.phase is Phase.PIPELINE
    line.end("forward-recv")
    line.end("forward-compute")
    assert line.take_phase_nanoseconds() == {
        Phase.OTHER: 1 + 2,
        Phase.FORWARD: 2 + 3,
        Phase.PIPELINE: 4,
    }


def test_a_span_without_a_phase_inherits_the_one_around_it() -> None:
    line = timeline(0, 1, 2, 3, 4, 5)
    line.begin("backward-compute")
    line.begin("something else")
    assert line.phase is Phase.BACKWARD
    line.end("something else")
    line.end("backward-compute")
    assert line.take_phase_nanoseconds() == {Phase.OTHER: 2, Phase.BACKWARD: 3}


def test_phases_sum_to_the_time_between_two_reads() -> None:
    line = timeline(0, 4, 10, 15, 21)
    line.begin("optimizer")
    assert sum(line.take_phase_nanoseconds().values()) == 10
    line.end("optimizer")
    assert line.take_phase_nanoseconds() == {Phase.OPTIMIZER: 5, Phase.OTHER: 6}


def test_spans_left_open_end_with_the_one_around_them() -> None:
    line = timeline(0, 1, 2, 5, 6)
    line.start_keeping_spans()
    line.begin("forward-compute")
    line.begin("forward-send")
    line.end("forward-compute")
    line.end("never begun")
    assert line.phase is Phase.OTHER
    assert line.take_spans() == (
        Span("forward-send", "pipeline", 2, 5),
        Span("forward-compute", "forward", 1, 5),
    )
    assert line.take_spans() == ()


def test_changing_the_clock_drops_open_spans() -> None:
    line = timeline(0, 1)
    line.begin("forward-compute")
    line.use_clock(Scripted([100, 130]))
    line.end("forward-compute")
    assert line.take_phase_nanoseconds() == {Phase.OTHER: 30}


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("optimizer-inner-step", Phase.OPTIMIZER),
        ("backward-send-forward-recv", Phase.PIPELINE),
        ("all-grads-sync", Phase.GRADIENT_SYNC),
        ("interval-time", Phase.OTHER),
    ],
)
def test_timer_names_of_megatron_map_to_phases(name: str, phase: Phase) -> None:
    assert phase_of_timer(name) is phase


def test_spans_are_not_kept_while_recording_is_off() -> None:
    line = timeline(0, 1, 5, 9, 20)
    line.begin("forward-compute")
    line.set_active(active=False)
    line.end("forward-compute")
    line.begin("optimizer")
    assert line.phase is Phase.OTHER
    line.set_active(active=True)
    line.end("optimizer")
    assert line.take_phase_nanoseconds() == {Phase.OTHER: 20 - 9}
