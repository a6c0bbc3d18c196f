"""Find ranks whose device stopped inside collectives that their whole group had entered.

NCCL counts per group the last collective that a rank's device completed. Peers can only complete a collective if every
rank's device takes part. If a rank entered the collective and did not complete it, its device failed or no longer
reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parakit.hang.evidence import RecordedCall
from parakit.hang.waits import Waits

OPERATIONS_OF_ALL_RANKS = frozenset(
    {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier"}
)
"""Operations that no rank completes without data of every rank; a broadcast's root may."""

FEWEST_CALLS_BEHIND = 2
"""Calls that a rank must be behind. Peers also complete a single call that does not fit this rank's."""


@dataclass(frozen=True)
class RankBehind:
    """A rank whose device is behind: the rank entered collectives that only its peers have completed."""

    rank: int
    first_call: RecordedCall
    """The earliest collective that only this rank's device did not complete."""
    peers: tuple[int, ...]
    """The ranks that completed the first call."""
    num_calls: int
    num_groups: int


def find_ranks_behind(waits: Waits) -> list[RankBehind]:
    """Return the ranks that completed at least FEWEST_CALLS_BEHIND fewer NCCL calls than their peers, sorted.

    The list is empty if there is no such rank. Only collectives count that every rank of the group entered. A
    rank that is behind by a single call is left out, because a call with a wrong size on another rank looks the
    same.
    """
    calls_by_rank: dict[int, list[tuple[RecordedCall, tuple[int, ...]]]] = {}
    for rank, call, peers in _calls_completed_by_peers(waits):
        calls_by_rank.setdefault(rank, []).append((call, peers))
    ranks_behind = []
    for rank, calls in sorted(calls_by_rank.items()):
        first_call, peers = min(calls, key=lambda pair: pair[0].created_ns)
        if len(calls) >= FEWEST_CALLS_BEHIND:
            groups = {call.group for call, _ in calls}
            ranks_behind.append(RankBehind(rank, first_call, peers, len(calls), len(groups)))
    return ranks_behind


def _calls_completed_by_peers(
    waits: Waits,
) -> Iterator[tuple[int, RecordedCall, tuple[int, ...]]]:
    """Yield each rank with a collective that it did not complete, and the peers that completed this collective."""
    evidence = waits.evidence
    for group, call in waits.unfinished_collectives:
        if not group.is_whole or call.operation not in OPERATIONS_OF_ALL_RANKS:
            continue
        peers = tuple(
            rank
            for rank in group.ranks
            if evidence.get_rank(rank).completed.get(group.name, -1) >= call.number
        )
        for rank in group.ranks:
            # Without NCCL's count (gloo) there is no device, and a lost message looks the same.
            if peers and rank not in peers and group.name in evidence.get_rank(rank).progress:
                own_call = evidence.get_rank(rank).collectives(group.name).get(call.number)
                yield rank, own_call or call, peers
