"""Which rank left the usual order of calls: training repeats itself and its ranks are alike, so a rank's
own past and the other ranks are the norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tools.hang.evidence import Evidence, GroupOfRanks, RecordedCall, Signature
from tools.hang.place import START_UP, place_of

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
    usual: RecordedCall
    meant: RecordedCall
    """The one of both that is wrong: made once more, or left out."""
    before: tuple[RecordedCall, ...]
    """The rank's calls before it."""


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
    """The only one of these ranks that made a call which no rank ever made after such calls."""
    if not all(one.calls for one in evidence.ranks.values()):
        return None
    numbers = _numbered(evidence, evidence.ranks)
    others: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for rank, own in numbers.items():
        for at in range(SHORTEST_CONTEXT, len(own)):
            others.setdefault(tuple(own[at - SHORTEST_CONTEXT : at + 1]), []).append((rank, at))
    found = []
    for rank in set(ranks):
        calls, own = evidence.of(rank).calls, numbers.get(rank, [])
        for at, usual, length in _departures(own, _in_order_until(evidence, rank)):
            made = others[tuple(own[at - SHORTEST_CONTEXT : at + 1])]
            if not any(
                other != rank and _common(numbers[other], before, own, at) >= length
                for other, before in made
            ):
                is_again = calls[at].signature == calls[at - 1].signature
                meant = calls[at if is_again else usual]
                found.append(Departure(rank, calls[at], calls[usual], meant, calls[:at]))
                break
    return found[0] if len(found) == 1 else None


def is_usual(evidence: Evidence, rank: int) -> bool:
    """Whether what a rank called since all ranks last met is what it called before in such places."""
    own = _numbered(evidence, [rank])[rank]
    start = max(_in_order_until(evidence, rank), SHORTEST_CONTEXT)
    pieces = [
        tuple(own[at - SHORTEST_CONTEXT : at + 1]) for at in range(SHORTEST_CONTEXT, len(own))
    ]
    seen = set(pieces[: start - SHORTEST_CONTEXT])
    return bool(seen) and seen.issuperset(pieces[start - SHORTEST_CONTEXT :])


def usual_next(evidence: Evidence, rank: int, others: Iterable[int]) -> RecordedCall | None:
    """What follows a rank's last calls by its own and others' past; None if nothing ever did."""
    numbers = _numbered(evidence, {rank, *others})
    own = numbers[rank]
    if not own:
        return None
    longest, found = SHORTEST_CONTEXT, None
    for other, theirs in numbers.items():
        for at in range(1, len(theirs)):
            if (
                theirs[at - 1] == own[-1]
                and (length := _common(theirs, at, own, len(own))) >= longest
            ):
                longest, found = length, evidence.of(other).calls[at]
    return found


def _in_order_until(evidence: Evidence, rank: int) -> int:
    """So many of a rank's calls were made before the last one that all ranks made and completed.

    Where another rank left no calls, a later one of the same group shows that: one that failed
    counts as completed, too.
    """
    done, mine = 0, evidence.of(rank)
    for group in evidence.groups.values():
        if len(group.ranks) < len(evidence.everybody):
            continue
        left = [one for one in map(evidence.of, group.ranks) if one.calls]
        of_all = [one.collectives(group.name) for one in left]
        own = mine.collectives(group.name)
        end = max(own, default=0) + (len(left) == len(group.ranks))
        for number, call in own.items():
            others = [calls[number] for calls in of_all if number in calls]
            is_one = all(other.signature == call.signature for other in others)
            # At start-up ranks come to a call of all by ways of their own.
            if number >= end or not (is_one or place_of(call.frames).part == START_UP):
                break
            if is_one and len(others) == len(of_all) and all(one.is_done for one in others):
                done = max(done, mine.calls.index(call) + 1)
    return done


def _numbered(evidence: Evidence, ranks: Iterable[int]) -> dict[int, list[int]]:
    """A number for each call: the same for those of one signature."""
    names: dict[Signature, int] = {}
    return {
        rank: [names.setdefault(call.signature, len(names)) for call in evidence.of(rank).calls]
        for rank in ranks
    }


def _fit(one: RecordedCall, other: RecordedCall) -> bool:
    if one.operation != other.operation:
        return False
    if one.operation not in _SAME_SIZES or not (one.dtypes and other.dtypes):
        return True
    return one.dtypes == other.dtypes and one.sizes == other.sizes


def _departures(numbers: Sequence[int], start: int) -> Iterator[tuple[int, int, int]]:
    """Calls that never followed the longest like context: place, the usual one's, and its length."""
    seen: dict[tuple[int, ...], list[int]] = {}
    for at in range(SHORTEST_CONTEXT, len(numbers)):
        earlier = seen.setdefault(tuple(numbers[at - SHORTEST_CONTEXT : at]), [])
        if at >= start and earlier:
            lengths = {before: _common(numbers, before, numbers, at) for before in earlier}
            longest = max(lengths.values())
            followers = {
                numbers[before]: before for before in earlier if lengths[before] == longest
            }
            if numbers[at] not in followers:
                yield at, max(followers.values()), longest
        earlier.append(at)


def _common(one: Sequence[int], at: int, other: Sequence[int], there: int) -> int:
    """How many calls before the two places are alike."""
    length = 0
    while (
        length < min(at, there, LONGEST_CONTEXT)
        and one[at - 1 - length] == other[there - 1 - length]
    ):
        length += 1
    return length
