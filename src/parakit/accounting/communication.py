"""Calls of one rank: equal ones are added up, iterations that make the same calls are one kind.

The most frequent kind of iteration is the steady one, the later of equally frequent ones, and its
figures are the result. The number of
rows sent to an expert differs from call to call, so calls over `ROUTED_GROUPS` are equal if their rows
have the same bytes, and their bytes are means.
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

NANO = 1e-9


class Call(NamedTuple):
    """What identifies a call; equal calls are added up."""

    group: str
    ranks: int
    operation: Operation
    phase: Phase
    dtype: str
    payload_bytes: int
    sent_bytes: int | None
    """From the splits of an all-to-all; None where it follows from the payload."""
    transport: Transport = Transport.NCCL
    row_bytes: int = 0
    """Of one row, where a router decides the number of rows; else 0."""

    @property
    def wire_bytes(self) -> int:
        """Sent by this rank."""
        if self.sent_bytes is not None:
            return self.sent_bytes
        return wire_bytes(self.operation, self.payload_bytes, self.ranks, self.transport)

    @property
    def kind(self) -> Call:
        """What it has in common with the calls it is added to."""
        return self._replace(payload_bytes=0, sent_bytes=None) if self.row_bytes else self


@dataclass(slots=True)
class ObservedCall:
    """One call, and the waits for its result."""

    call: Call
    started: TimeMark
    issued: TimeMark
    waits: list[tuple[Phase, TimeMark, TimeMark]] = field(default_factory=list)
    """The phase of the wait, which may differ from the call's; its beginning and its end."""


@dataclass(frozen=True)
class IterationFigures:
    """What one iteration was for this rank."""

    seconds: float
    exposed_seconds: float
    """In which it waited for others or for a transfer."""
    sent_bytes: int


@dataclass
class _Sums:
    """Totals over iterations that made the same calls."""

    iterations: int = 0
    timed: int = 0
    """Of the iterations, those whose times count."""
    payload_bytes: Counter[Call] = field(default_factory=Counter)
    wire_bytes: Counter[Call] = field(default_factory=Counter)
    wait_ns: Counter[Call] = field(default_factory=Counter)
    transfer_ns: Counter[Call] = field(default_factory=Counter)
    phase_ns: Counter[Phase] = field(default_factory=Counter)
    blocked_ns: Counter[Phase] = field(default_factory=Counter)


class CommunicationLog:
    """Keeps an iteration's calls and adds them up when it has ended; only then are the clocks read."""

    def __init__(self) -> None:
        self.observed_calls: list[ObservedCall] = []
        """Calls of the present iteration."""
        self._kinds: dict[frozenset[tuple[Call, int]], _Sums] = {}
        self._warm_up = 0

    def end_iteration(self, phase_ns: Mapping[Phase, int], clock: Clock) -> IterationFigures:
        """Close an iteration with its nanoseconds in each phase; the clock has settled."""
        sums = self._end_untimed()
        sums.timed += 1
        sums.phase_ns.update(phase_ns)
        blocked_before = sums.blocked_ns.total()
        for watched in self.observed_calls:
            _add_times(watched, sums, clock.to_nanoseconds)
        figures = IterationFigures(
            seconds=sum(phase_ns.values()) * NANO,
            exposed_seconds=(sums.blocked_ns.total() - blocked_before) * NANO,
            sent_bytes=sum(watched.call.wire_bytes for watched in self.observed_calls),
        )
        self.drop_calls()
        return figures

    def end_untimed_iteration(self) -> None:
        """Close an iteration that something else made slower: its calls count, its times do not."""
        self._end_untimed()
        self.drop_calls()

    def end_warm_up(self) -> None:
        """Close an iteration that makes calls of its own, and is never the steady one."""
        self._warm_up += 1
        self.drop_calls()

    def _end_untimed(self) -> _Sums:
        counts = Counter(watched.call.kind for watched in self.observed_calls)
        sums = self._kinds.setdefault(frozenset(counts.items()), _Sums())
        sums.iterations += 1
        for watched in self.observed_calls:
            sums.payload_bytes[watched.call.kind] += watched.call.payload_bytes
            sums.wire_bytes[watched.call.kind] += watched.call.wire_bytes
        return sums

    def call_spans(self, clock: Clock) -> Iterator[Span]:
        """The iteration's calls, each from being issued to having its result; the clock has settled."""
        for watched in self.observed_calls:
            end = watched.waits[-1][2] if watched.waits else watched.issued
            name = f"{watched.call.operation} {watched.call.group}"
            start_ns, end_ns = clock.to_nanoseconds(watched.started), clock.to_nanoseconds(end)
            yield Span(name, "communication", start_ns, end_ns)

    def drop_calls(self) -> None:
        """Drop the calls since the last iteration ended."""
        self.observed_calls.clear()

    def steady_communication(self, rank: int) -> RankCommunication:
        """Calls of a steady iteration."""
        if not self._kinds:
            return RankCommunication(rank, 0, self._warm_up, ())
        calls, sums = self._steady()
        others = sum(other.iterations for other in self._kinds.values()) - sums.iterations
        others += self._warm_up
        made = _rows(dict(calls), sums)
        rows = sorted(made, key=lambda row: (row.group, row.phase, row.operation))
        return RankCommunication(rank, sums.iterations, others, tuple(rows))

    def steady_time(self, rank: int) -> RankTime:
        """Seconds of a steady iteration."""
        sums = self._steady()[1] if self._kinds else _Sums()
        if not sums.timed:
            return RankTime(rank, 0.0, {}, {})
        per_iteration = NANO / sums.timed
        return RankTime(
            rank,
            sum(sums.phase_ns.values()) * per_iteration,
            {phase: ns * per_iteration for phase, ns in sums.phase_ns.items()},
            {phase: ns * per_iteration for phase, ns in sums.blocked_ns.items()},
        )

    def _steady(self) -> tuple[frozenset[tuple[Call, int]], _Sums]:
        latest_first = reversed(self._kinds.items())
        return max(latest_first, key=lambda item: item[1].iterations)


def _add_times(watched: ObservedCall, sums: _Sums, read: Callable[[TimeMark], int]) -> None:
    call, started = watched.call.kind, read(watched.started)
    issue_ns = read(watched.issued) - started
    sums.wait_ns[call] += issue_ns
    sums.blocked_ns[call.phase] += issue_ns
    for phase, began, ended in watched.waits:
        wait_ns = read(ended) - read(began)
        sums.wait_ns[call] += wait_ns
        sums.blocked_ns[phase] += wait_ns
        sums.transfer_ns[call] += read(ended) - started


def _rows(counts: Mapping[Call, int], sums: _Sums) -> Iterator[CallSummary]:
    """In the order in which they were first made."""
    per_iteration = NANO / max(1, sums.timed)
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
