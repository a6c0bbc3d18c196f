"""Which rank left the usual order of calls: training repeats itself, so its own past is the norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.hang.evidence import Evidence, GroupOfRanks, RecordedCall, Signature

LONGEST_CONTEXT = 64
SHORTEST_CONTEXT = 3
"""Calls before one that must have been seen before, for what usually follows them to be known."""

_SAME_SIZES = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier"}
"""Operations whose ranks all give a tensor of one size."""


@dataclass(frozen=True)
class Departure:
    """A call of a rank that never followed what came before it, and what did."""

    rank: int
    call: RecordedCall
    usual: Signature

    @property
    def key(self) -> tuple[Signature, Signature]:
        """What came, and what usually does."""
        return self.usual, self.call.signature


@dataclass(frozen=True)
class Mismatch:
    """Two ranks' calls of one number in one group, which do not fit together."""

    group: GroupOfRanks
    first: tuple[int, RecordedCall]
    second: tuple[int, RecordedCall]

    @property
    def differs(self) -> str:
        """In what: operation, size, dtype or place in the code."""
        one, other = self.first[1], self.second[1]
        if one.operation != other.operation:
            return "operation"
        if one.dtypes != other.dtypes:
            return "dtype"
        return "size" if one.sizes != other.sizes else "place in the code"


def find_mismatch(evidence: Evidence) -> Mismatch | None:
    """The first pair of calls, by time, that do not fit together in operation, size or dtype."""
    found: list[Mismatch] = []
    for group in evidence.groups.values():
        by_number: dict[int, list[tuple[int, RecordedCall]]] = {}
        for rank in group.ranks:
            # Calls that a coalescing manager joins have one number: the last stands for them.
            for number, call in evidence.of(rank).collectives(group.name).items():
                by_number.setdefault(number, []).append((rank, call))
        for number in sorted(by_number):
            first, *others = by_number[number]
            other = next((one for one in others if not _fit(first[1], one[1])), None)
            if other is not None:
                found.append(Mismatch(group, first, other))
                break
    return min(found, key=lambda one: one.first[1].created_ns, default=None)


def find_departure(evidence: Evidence, ranks: Iterable[int]) -> Departure | None:
    """The last departure that one rank makes more often than all others do, if it is the only one."""
    of_rank = {rank: _departures(rank, evidence.of(rank).calls) for rank in set(ranks)}
    counts = {rank: Counter(one.key for one in found) for rank, found in of_rank.items()}
    own = []
    for rank, found in of_rank.items():
        others = [count for other, count in counts.items() if other != rank]
        alone = [
            one for one in found if all(counts[rank][one.key] > count[one.key] for count in others)
        ]
        own += alone[-1:]
    return own[0] if len(own) == 1 else None


def _fit(one: RecordedCall, other: RecordedCall) -> bool:
    if one.operation != other.operation:
        return False
    if one.operation not in _SAME_SIZES or not (one.dtypes and other.dtypes):
        return True
    return one.dtypes == other.dtypes and one.sizes == other.sizes


def _departures(rank: int, calls: Sequence[RecordedCall]) -> list[Departure]:
    signatures = [call.signature for call in calls]
    names: dict[Signature, int] = {}
    numbers = [names.setdefault(one, len(names)) for one in signatures]
    found = []
    seen: dict[tuple[int, ...], list[int]] = {}
    for at in range(SHORTEST_CONTEXT, len(numbers)):
        context = tuple(numbers[at - SHORTEST_CONTEXT : at])
        earlier = seen.setdefault(context, [])
        followers = _followers(numbers, at, earlier)
        if at > len(numbers) // 3 and followers and numbers[at] not in followers:
            found.append(Departure(rank, calls[at], signatures[max(followers.values())]))
        earlier.append(at)
    return found


def _followers(numbers: Sequence[int], at: int, earlier: Sequence[int]) -> dict[int, int]:
    """What followed the longest context like this one's, and where; empty if none is like it."""
    longest, found = 0, dict[int, int]()
    for before in earlier:
        length = SHORTEST_CONTEXT
        while length < min(before, LONGEST_CONTEXT) and (
            numbers[before - 1 - length] == numbers[at - 1 - length]
        ):
            length += 1
        if length > longest:
            longest, found = length, {}
        if length == longest:
            found[numbers[before]] = before
    return found
