"""Calls of one rank, summed by what they are, and told apart by iteration.

Iterations that make the same calls are counted together; the most frequent kind is the steady one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.measurements import (
    Calls,
    Operation,
    Phase,
    RankCommunication,
    RankTime,
    Transport,
    algorithm,
    wire_bytes,
)

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


@dataclass
class Pending:
    """A call whose result nobody has waited for yet."""

    call: Call
    started_ns: int


@dataclass
class _Kind:
    """Iterations that made the same calls."""

    iterations: int = 0
    nanoseconds: int = 0
    wait_ns: Counter[Call] = field(default_factory=Counter)
    transfer_ns: Counter[Call] = field(default_factory=Counter)
    phase_ns: Counter[Phase] = field(default_factory=Counter)
    blocked_ns: Counter[Phase] = field(default_factory=Counter)


class CommunicationLedger:
    """Counts calls and the time they take."""

    def __init__(self) -> None:
        self._counts: Counter[Call] = Counter()
        self._wait_ns: Counter[Call] = Counter()
        self._transfer_ns: Counter[Call] = Counter()
        self._blocked_ns: Counter[Phase] = Counter()
        self._kinds: dict[frozenset[tuple[Call, int]], _Kind] = {}

    def add(self, call: Call, issue_ns: int) -> None:
        """Count a call that took `issue_ns` to be issued."""
        self._counts[call] += 1
        self._wait_ns[call] += issue_ns
        self._blocked_ns[call.phase] += issue_ns

    def waited(self, pending: Pending, phase: Phase, wait_ns: int, now_ns: int) -> None:
        """Somebody waited for the call's result, in a later phase perhaps, and has it now."""
        self._wait_ns[pending.call] += wait_ns
        self._blocked_ns[phase] += wait_ns
        self._transfer_ns[pending.call] += now_ns - pending.started_ns

    def end_iteration(self, nanoseconds: int, phase_ns: dict[Phase, int]) -> None:
        """Close an iteration that took so long, and so long in each phase."""
        kind = self._kinds.setdefault(frozenset(self._counts.items()), _Kind())
        kind.iterations += 1
        kind.nanoseconds += nanoseconds
        kind.wait_ns += self._wait_ns
        kind.transfer_ns += self._transfer_ns
        kind.phase_ns += Counter(phase_ns)
        kind.blocked_ns += self._blocked_ns
        self.forget()

    def forget(self) -> None:
        """Drop what was counted since the last iteration ended."""
        for counter in (self._counts, self._wait_ns, self._transfer_ns, self._blocked_ns):
            counter.clear()

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
            kind.nanoseconds * per_iteration,
            {phase: ns * per_iteration for phase, ns in kind.phase_ns.items()},
            {phase: ns * per_iteration for phase, ns in kind.blocked_ns.items()},
        )

    def _steady(self) -> tuple[frozenset[tuple[Call, int]], _Kind]:
        return max(self._kinds.items(), key=lambda item: item[1].iterations)


def _rows(calls: Iterable[tuple[Call, int]], kind: _Kind) -> Iterable[Calls]:
    for call, count in calls:
        sent = call.sent_bytes
        if sent is None:
            sent = wire_bytes(call.operation, call.payload_bytes, call.ranks, call.transport)
        yield Calls(
            group=call.group,
            ranks=call.ranks,
            operation=call.operation,
            phase=call.phase,
            dtype=call.dtype,
            calls=count,
            payload_bytes=call.payload_bytes,
            wire_bytes=count * sent,
            algorithm=algorithm(call.operation, call.transport),
            wait_seconds=kind.wait_ns[call] * NANO / kind.iterations,
            transfer_seconds=kind.transfer_ns[call] * NANO / kind.iterations,
        )
