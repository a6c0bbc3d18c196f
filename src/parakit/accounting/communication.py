"""Count the calls of one rank: equal calls are added up, and iterations with the same calls are one kind.

The most frequent kind of iteration is the steady one; of equally frequent kinds, the later. The steady kind's
figures are the result.

A router decides how many rows are sent to an expert, so the bytes of calls over `ROUTED_GROUPS` vary. Such
calls are equal if their rows have the same bytes, and their bytes are means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from parakit.accounting.timeline import Clock, Span, TimeMark
from parakit.artifacts.measurements import CallSummary, RankCommunication, RankTime
from parakit.config.run import Transport
from parakit.costs import Operation, Phase, describe_algorithm, wire_bytes

SECONDS_PER_NANOSECOND = 1e-9


class Call(NamedTuple):
    """The properties of a communication call on a process group. Calls with equal properties are added up."""

    group: str
    ranks: int
    operation: Operation
    phase: Phase
    dtype: str
    payload_bytes: int
    sent_bytes: int | None
    """Bytes that this rank sends, from the splits of an all-to-all; None if the payload determines them."""
    transport: Transport = Transport.NCCL
    row_bytes: int = 0
    """Bytes per row if a router decides the number of rows; else 0."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends for the call."""
        if self.sent_bytes is not None:
            return self.sent_bytes
        return wire_bytes(self.operation, self.payload_bytes, self.ranks, self.transport)

    @property
    def kind(self) -> Call:
        """The call without its bytes if a router decides them; calls of one kind are added up."""
        return self._replace(payload_bytes=0, sent_bytes=None) if self.row_bytes else self


@dataclass(slots=True)
class ObservedCall:
    """A communication call with the times of its start, its return, and each wait for its result."""

    call: Call
    started: TimeMark
    issued: TimeMark
    waits: list[tuple[Phase, TimeMark, TimeMark]] = field(default_factory=list)
    """Phase, start and end of each wait. The phase of a wait may differ from the call's phase."""


@dataclass(frozen=True)
class IterationFigures:
    """The time and the communication of one iteration of this rank."""

    seconds: float
    exposed_seconds: float
    """Time in which the rank waited for other ranks or for a transfer."""
    sent_bytes: int


@dataclass
class _IterationSums:
    """Sums over all iterations that made the same calls."""

    iterations: int = 0
    timed: int = 0
    """The number of iterations whose times count."""
    payload_bytes: Counter[Call] = field(default_factory=Counter)
    wire_bytes: Counter[Call] = field(default_factory=Counter)
    wait_ns: Counter[Call] = field(default_factory=Counter)
    transfer_ns: Counter[Call] = field(default_factory=Counter)
    phase_ns: Counter[Phase] = field(default_factory=Counter)
    blocked_ns: Counter[Phase] = field(default_factory=Counter)


class CommunicationLog:
    """The calls of the present iteration, and their sums over past iterations.

    Clocks are read only when an iteration ends.
    """

    def __init__(self) -> None:
        self.observed_calls: list[ObservedCall] = []
        """Calls of the present iteration."""
        self._sums_by_calls: dict[frozenset[tuple[Call, int]], _IterationSums] = {}
        self._warm_up_iterations = 0

    def end_iteration(self, phase_ns: Mapping[Phase, int], clock: Clock) -> IterationFigures:
        """Add the iteration's calls and times to the sums, drop the calls, and return the iteration's figures.

        The figures are seconds, seconds in which communication was waited for, and bytes sent.

        Args:
            phase_ns: The iteration's nanoseconds in each phase.
            clock: The clock with which the calls were timed. It must be synchronized.
        """
        sums = self._add_iteration()
        sums.timed += 1
        sums.phase_ns.update(phase_ns)
        blocked_ns_before = sums.blocked_ns.total()
        for observed in self.observed_calls:
            _add_times(observed, sums, clock.to_nanoseconds)
        blocked_ns = sums.blocked_ns.total() - blocked_ns_before
        figures = IterationFigures(
            seconds=sum(phase_ns.values()) * SECONDS_PER_NANOSECOND,
            exposed_seconds=blocked_ns * SECONDS_PER_NANOSECOND,
            sent_bytes=sum(observed.call.wire_bytes for observed in self.observed_calls),
        )
        self.drop_calls()
        return figures

    def end_untimed_iteration(self) -> None:
        """Add the calls of an iteration that something else made slower; its times do not count."""
        self._add_iteration()
        self.drop_calls()

    def end_warm_up(self) -> None:
        """Count an iteration that makes calls of its own and can never be a steady one."""
        self._warm_up_iterations += 1
        self.drop_calls()

    def _add_iteration(self) -> _IterationSums:
        """Add the bytes of the iteration's calls to the sums of iterations with equal calls, and return the sums."""
        counts = Counter(observed.call.kind for observed in self.observed_calls)
        calls = frozenset(counts.items())
        sums = self._sums_by_calls.setdefault(calls, _IterationSums())
        sums.iterations += 1
        for observed in self.observed_calls:
            call = observed.call
            sums.payload_bytes[call.kind] += call.payload_bytes
            sums.wire_bytes[call.kind] += call.wire_bytes
        return sums

    def call_spans(self, clock: Clock) -> Iterator[Span]:
        """Yield a span for each call of the iteration, from its start to the end of the last wait for its result.

        If nothing waited for the result, the span ends when the call returned. The clock must be synchronized.
        """
        for observed in self.observed_calls:
            end = observed.waits[-1][2] if observed.waits else observed.issued
            name = f"{observed.call.operation} {observed.call.group}"
            start_ns, end_ns = clock.to_nanoseconds(observed.started), clock.to_nanoseconds(end)
            yield Span(name, "communication", start_ns, end_ns)

    def drop_calls(self) -> None:
        """Drop the calls since the last iteration ended."""
        self.observed_calls.clear()

    def steady_communication(self, rank: int) -> RankCommunication:
        """Return the communication calls of a steady iteration, sorted by group, phase and operation.

        Without any counted iteration, the result has no calls.
        """
        if not self._sums_by_calls:
            return RankCommunication(rank, 0, self._warm_up_iterations, ())
        calls, sums = self._find_steady()
        all_iterations = sum(kind.iterations for kind in self._sums_by_calls.values())
        other_iterations = all_iterations - sums.iterations + self._warm_up_iterations
        summaries = _summarise_calls(dict(calls), sums)
        rows = sorted(summaries, key=lambda row: (row.group, row.phase, row.operation))
        return RankCommunication(rank, sums.iterations, other_iterations, tuple(rows))

    def steady_time(self, rank: int) -> RankTime:
        """Return the mean seconds of a steady iteration: in total, by phase, and blocked by communication by phase.

        If no iteration was timed, the total is 0 and both dictionaries are empty.
        """
        sums = self._find_steady()[1] if self._sums_by_calls else _IterationSums()
        if not sums.timed:
            return RankTime(rank, 0.0, {}, {})
        per_iteration = SECONDS_PER_NANOSECOND / sums.timed
        return RankTime(
            rank,
            sum(sums.phase_ns.values()) * per_iteration,
            {phase: ns * per_iteration for phase, ns in sums.phase_ns.items()},
            {phase: ns * per_iteration for phase, ns in sums.blocked_ns.items()},
        )

    def _find_steady(self) -> tuple[frozenset[tuple[Call, int]], _IterationSums]:
        """Return the most frequent kind of iteration: its calls with their counts, and its sums."""
        latest_first = reversed(self._sums_by_calls.items())
        return max(latest_first, key=lambda item: item[1].iterations)


def _add_times(
    observed: ObservedCall, sums: _IterationSums, to_nanoseconds: Callable[[TimeMark], int]
) -> None:
    """Add the times of a call to the sums.

    The time in which the rank issues the call, and the time in which it waits for the result, count as blocked.
    The time from the start of the call to the end of a wait is added as its transfer.
    """
    call, started_ns = observed.call.kind, to_nanoseconds(observed.started)
    issue_ns = to_nanoseconds(observed.issued) - started_ns
    sums.wait_ns[call] += issue_ns
    sums.blocked_ns[call.phase] += issue_ns
    for phase, wait_start, wait_end in observed.waits:
        wait_ns = to_nanoseconds(wait_end) - to_nanoseconds(wait_start)
        sums.wait_ns[call] += wait_ns
        sums.blocked_ns[phase] += wait_ns
        sums.transfer_ns[call] += to_nanoseconds(wait_end) - started_ns


def _summarise_calls(counts: Mapping[Call, int], sums: _IterationSums) -> Iterator[CallSummary]:
    """Yield one summary per kind of call, with figures per iteration, in the order of the first calls.

    Args:
        counts: Calls per iteration, by kind.
        sums: Sums over all iterations that made these calls.
    """
    per_iteration = SECONDS_PER_NANOSECOND / max(1, sums.timed)
    for call in sums.payload_bytes:
        count = counts[call]
        yield CallSummary(
            group=call.group,
            ranks=call.ranks,
            operation=call.operation,
            phase=call.phase,
            dtype=call.dtype,
            calls=count,
            payload_bytes=round(sums.payload_bytes[call] / (count * sums.iterations)),
            wire_bytes=round(sums.wire_bytes[call] / sums.iterations),
            algorithm=describe_algorithm(call.operation, call.transport),
            wait_seconds=sums.wait_ns[call] * per_iteration,
            transfer_seconds=sums.transfer_ns[call] * per_iteration,
        )
