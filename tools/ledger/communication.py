"""Calls of one rank, summed by what they are, and told apart by iteration.

Iterations that make the same calls are counted together; the most frequent kind is the steady one. How
many rows are sent to an expert differs from call to call, so there only the bytes of a row must be the
same, and the bytes of a call are means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.ledger.clock import Clock, Mark
from tools.ledger.timeline import Span
from tools.records.measurements import (
    Calls,
    Operation,
    Phase,
    RankCommunication,
    RankTime,
    algorithm,
    wire_bytes,
)
from tools.spec.run import Transport

NANO = 1e-9


class Call(NamedTuple):
    """What a call is; equal calls are counted together."""

    group: str
    ranks: int
    operation: Operation
    phase: Phase
    dtype: str
    payload_bytes: int
    sent_bytes: int | None
    """Where the splits say it exactly (uneven all-to-all); else it follows from the payload."""
    transport: Transport = Transport.NCCL
    row_bytes: int = 0
    """Of one row, where a router decides how many there are; else 0."""

    @property
    def wire_bytes(self) -> int:
        """Sent by this rank."""
        if self.sent_bytes is not None:
            return self.sent_bytes
        return wire_bytes(self.operation, self.payload_bytes, self.ranks, self.transport)

    @property
    def alike(self) -> Call:
        """What it has in common with the calls it is counted with."""
        return self._replace(payload_bytes=0, sent_bytes=None) if self.row_bytes else self


@dataclass(slots=True)
class Watched:
    """One call, and who waited for its result when."""

    call: Call
    started: Mark
    issued: Mark
    waits: list[tuple[Phase, Mark, Mark]] = field(default_factory=list)
    """The phase of the wait, not of the call; its beginning and its end."""


@dataclass
class _Kind:
    """Iterations that made the same calls."""

    iterations: int = 0
    payload_bytes: Counter[Call] = field(default_factory=Counter)
    wire_bytes: Counter[Call] = field(default_factory=Counter)
    wait_ns: Counter[Call] = field(default_factory=Counter)
    transfer_ns: Counter[Call] = field(default_factory=Counter)
    phase_ns: Counter[Phase] = field(default_factory=Counter)
    blocked_ns: Counter[Phase] = field(default_factory=Counter)


class CommunicationLedger:
    """Keeps an iteration's calls, and sums them up when it has ended: only then is the time read."""

    def __init__(self) -> None:
        self.watched: list[Watched] = []
        """Of the iteration that is going on."""
        self._kinds: dict[frozenset[tuple[Call, int]], _Kind] = {}

    def end_iteration(self, phase_ns: Mapping[Phase, int], clock: Clock) -> None:
        """Close an iteration that took so long in each phase; the clock has settled."""
        counts = Counter(watched.call.alike for watched in self.watched)
        kind = self._kinds.setdefault(frozenset(counts.items()), _Kind())
        kind.iterations += 1
        kind.phase_ns.update(phase_ns)
        for watched in self.watched:
            _sum_up(watched, kind, clock.nanoseconds)
        self.forget()

    def spans(self, clock: Clock) -> Iterator[Span]:
        """The iteration's calls, each from being issued to having its result; the clock has settled."""
        for watched in self.watched:
            end = watched.waits[-1][2] if watched.waits else watched.issued
            name = f"{watched.call.operation} {watched.call.group}"
            start_ns, end_ns = clock.nanoseconds(watched.started), clock.nanoseconds(end)
            yield Span(name, "communication", start_ns, end_ns)

    def forget(self) -> None:
        """Drop what was watched since the last iteration ended."""
        self.watched.clear()

    def communication(self, rank: int) -> RankCommunication:
        """Calls of a steady iteration."""
        if not self._kinds:
            return RankCommunication(rank, 0, 0, ())
        calls, kind = self._steady()
        others = sum(other.iterations for other in self._kinds.values()) - kind.iterations
        rows = sorted(_rows(calls, kind), key=lambda row: (row.group, row.phase, row.operation))
        return RankCommunication(rank, kind.iterations, others, tuple(rows))

    def time(self, rank: int) -> RankTime:
        """Seconds of a steady iteration."""
        if not self._kinds:
            return RankTime(rank, 0.0, {}, {})
        _, kind = self._steady()
        per_iteration = NANO / kind.iterations
        return RankTime(
            rank,
            sum(kind.phase_ns.values()) * per_iteration,
            {phase: ns * per_iteration for phase, ns in kind.phase_ns.items()},
            {phase: ns * per_iteration for phase, ns in kind.blocked_ns.items()},
        )

    def _steady(self) -> tuple[frozenset[tuple[Call, int]], _Kind]:
        return max(self._kinds.items(), key=lambda item: item[1].iterations)


def _sum_up(watched: Watched, kind: _Kind, read: Callable[[Mark], int]) -> None:
    call, started = watched.call.alike, read(watched.started)
    issue_ns = read(watched.issued) - started
    kind.payload_bytes[call] += watched.call.payload_bytes
    kind.wire_bytes[call] += watched.call.wire_bytes
    kind.wait_ns[call] += issue_ns
    kind.blocked_ns[call.phase] += issue_ns
    for phase, began, ended in watched.waits:
        wait_ns = read(ended) - read(began)
        kind.wait_ns[call] += wait_ns
        kind.blocked_ns[phase] += wait_ns
        kind.transfer_ns[call] += read(ended) - started


def _rows(calls: Iterable[tuple[Call, int]], kind: _Kind) -> Iterable[Calls]:
    for call, count in calls:
        yield Calls(
            group=call.group,
            ranks=call.ranks,
            operation=call.operation,
            phase=call.phase,
            dtype=call.dtype,
            calls=count,
            payload_bytes=round(kind.payload_bytes[call] / (count * kind.iterations)),
            wire_bytes=round(kind.wire_bytes[call] / kind.iterations),
            algorithm=algorithm(call.operation, call.transport),
            wait_seconds=kind.wait_ns[call] * NANO / kind.iterations,
            transfer_seconds=kind.transfer_ns[call] * NANO / kind.iterations,
        )
