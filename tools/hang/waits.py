"""Who waits for whom, a graph of ranks: from calls that some entered and others did not, and stacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile

from tools.hang.evidence import Evidence, Frame, GroupOfRanks, RankEvidence, RecordedCall

_DISTRIBUTED = "/torch/distributed/"
_CALLING = ("/torch/", "megatron_patches/")
_COUNTING = "tools/ledger/"
_INNERMOST = 6
_RAISING = "_distributed_excepthook"
_STAGES_AWAITED = {
    "send_forward": {+1},
    "recv_backward": {+1},
    "send_forward_recv_backward": {+1},
    "send_backward_recv_backward": {+1},
    "recv_forward": {-1},
    "send_backward": {-1},
    "send_backward_recv_forward": {-1},
    "send_forward_backward_recv_forward_backward": {+1, -1},
    "send_forward_recv_forward": {+1, -1},
    "pp_pre_forward": {-1},
    "pp_post_forward": {+1},
    "pp_pre_backward": {+1},
    "pp_post_backward": {-1},
    "forward_backward_pipelining_with_interleaving": {+1, -1},
}
"""Megatron's functions of pipeline communication (`p2p_communication.py`, then `schedules.py`)."""
_EXCHANGES = ("p2p_communication", "pipeline_parallel/schedules")


@dataclass(frozen=True)
class Wait:
    """A rank waits in a call for others."""

    rank: int
    awaited: int
    call: RecordedCall | None = field(compare=False)
    """None where only its stack says so."""


@dataclass(frozen=True)
class Waits:
    """The graph of a job."""

    evidence: Evidence
    edges: Mapping[int, tuple[Wait, ...]]
    """By the rank that waits."""
    in_calls: frozenset[int]
    """Ranks that are in a call which is not done, whether or not it is known for whom they wait."""
    incomplete: tuple[tuple[GroupOfRanks, RecordedCall], ...]
    """Calls that every known rank of the group entered and not all finished."""
    exchanges: tuple[int, ...] = ()
    """Ranks that are in an exchange with another stage, which is in it, too."""

    @property
    def roots(self) -> list[tuple[int, ...]]:
        """Ranks that others wait for and that wait for nobody; then circles of ranks."""
        awaited = {wait.awaited for waits in self.edges.values() for wait in waits}
        roots: list[tuple[int, ...]] = [(r,) for r in sorted(awaited) if not self.edges.get(r)]
        explained = self.behind([rank for root in roots for rank in root])
        left = {rank for rank in self.edges if self.edges[rank] and rank not in explained}
        while left:
            circle = self._circle(min(left), left)
            roots.append(circle)
            left -= self.behind(circle) | set(circle)
        return roots

    def behind(self, roots: Iterable[int]) -> set[int]:
        """Ranks that wait for these, directly or through others."""
        waiting: dict[int, list[int]] = {}
        for rank, waits in self.edges.items():
            for wait in waits:
                waiting.setdefault(wait.awaited, []).append(rank)
        found = set(roots)
        todo = list(found)
        while todo:
            for rank in waiting.get(todo.pop(), ()):
                if rank not in found:
                    found.add(rank)
                    todo.append(rank)
        return found - set(roots)

    def calls_into(self, roots: Iterable[int]) -> list[Wait]:
        """Waits for these ranks, the earliest first."""
        wanted = set(roots)
        into = [w for ws in self.edges.values() for w in ws if w.awaited in wanted]
        return sorted(into, key=lambda w: w.call.created_ns if w.call else 0)

    def _circle(self, start: int, among: set[int]) -> tuple[int, ...]:
        path = [start]
        while True:
            following = next(w.awaited for w in self.edges[path[-1]] if w.awaited in among)
            if following in path:
                return tuple(sorted(path[path.index(following) :]))
            path.append(following)


def find_waits(evidence: Evidence) -> Waits:
    """The graph of a job."""
    edges: dict[int, tuple[Wait, ...]] = {}
    in_calls: set[int] = set()
    exchanges: list[int] = []
    incomplete: dict[tuple[str, int], tuple[GroupOfRanks, RecordedCall]] = {}
    for rank, one in evidence.ranks.items():
        if one.is_stopped:
            continue
        waits: dict[int, Wait] = {}
        for call in one.pending:
            group = evidence.groups[call.group]
            missing = _not_in(evidence, rank, call, group)
            for other in missing:
                waits.setdefault(other, Wait(rank, other, call))
            if not missing and not call.is_point_to_point:
                incomplete.setdefault((call.group, call.number), (group, call))
        if _has_raised(one):
            # It lost a peer that left nothing; the call that failed counts as completed.
            last = one.calls[-1]
            gone = [r for r in evidence.groups[last.group].ranks if not evidence.of(r).calls]
            waits |= {other: Wait(rank, other, last) for other in gone}
        if not waits and not one.pending:
            # By the stack: gloo's flight recorder keeps no point-to-point call. Where both are in the
            # exchange of the same two stages, neither waits for the other to come.
            for other in _neighbours(evidence, one):
                if rank in _neighbours(evidence, evidence.of(other)):
                    exchanges.append(rank)
                else:
                    waits[other] = Wait(rank, other, None)
        if one.pending or waits or is_in_collective(one.stack):
            in_calls.add(rank)
        edges[rank] = tuple(waits.values())
    met = tuple(sorted({*exchanges}))
    return Waits(evidence, edges, frozenset(in_calls), tuple(incomplete.values()), met)


def _has_raised(one: RankEvidence) -> bool:
    """Whether an exception is ending it."""
    return bool(one.calls) and any(frame.function == _RAISING for frame in one.stack)


def is_in_collective(stack: Iterable[Frame]) -> bool:
    """Whether the innermost frames are torch.distributed's, or Megatron's that wait for an exchange."""
    # Calls and their waits go through this kit's counting of them.
    inner = dropwhile(lambda frame: _COUNTING in frame.file, stack)
    innermost = tuple(inner)[:_INNERMOST]
    # A request's wait is C++: the innermost Python frame is Megatron's.
    if not innermost or any(file in innermost[0].file for file in _EXCHANGES):
        return bool(innermost)
    # What torch called back is at work by itself.
    waits = any(folder in innermost[0].file for folder in _CALLING)
    return waits and any(_DISTRIBUTED in frame.file for frame in innermost)


def _not_in(
    evidence: Evidence, rank: int, call: RecordedCall, group: GroupOfRanks
) -> tuple[int, ...]:
    """Ranks that this call waits for."""
    if not call.is_point_to_point:
        others = (other for other in group.ranks if other != rank)
        return tuple(other for other in others if _is_awaited(evidence.of(other), call))
    if call.peer is None or call.peer >= len(group.ranks):
        return ()
    peer = group.ranks[call.peer]
    answer = "recv" if call.operation == "send" else "send"
    expected = (call.group, answer, group.ranks.index(rank))
    theirs = evidence.of(peer).pending
    return () if any((c.group, c.operation, c.peer) == expected for c in theirs) else (peer,)


def _is_awaited(other: RankEvidence, call: RecordedCall) -> bool:
    """Whether it never came to this call, or its device has not while this rank's has."""
    # A stopped one may have gone on when it was continued for its dump.
    if other.is_stopped or other.last.get(call.group, -1) < call.number:
        return True
    if not call.is_started or any(one.is_started for one in other.pending):
        return False
    same = (c for c in other.pending if c.group == call.group and not c.is_point_to_point)
    return any(c.number == call.number for c in same)


def _neighbours(evidence: Evidence, one: RankEvidence) -> tuple[int, ...]:
    """Ranks of the stages that it exchanges with."""
    if not is_in_collective(one.stack) or one.is_stopped:
        return ()
    inside = (f for f in one.stack if any(file in f.file for file in _EXCHANGES))
    names = {frame.function.rpartition(".")[2] for frame in inside}
    steps = next((steps for name, steps in _STAGES_AWAITED.items() if name in names), ())
    for group in evidence.groups.values():
        if group.is_pipeline and one.rank in group.ranks:
            at, size = group.ranks.index(one.rank), len(group.ranks)
            return tuple(sorted({group.ranks[(at + step) % size] for step in steps} - {one.rank}))
    return ()
