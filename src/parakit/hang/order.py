"""Which rank left the usual order of calls: training repeats itself and its ranks are alike, so a rank's
own past and the other ranks are the norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from parakit.hang.evidence import GroupOfRanks, HangEvidence, RecordedCall, Signature
from parakit.hang.place import START_UP, place_of

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
    is_alike: bool
    """Whether it is one of equal calls in a row: which one was made again or left out is not seen."""


@dataclass(frozen=True)
class CallMismatch:
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


def find_mismatch(evidence: HangEvidence) -> CallMismatch | None:
    """The first pair of calls, by time, that do not fit together in operation, size or dtype."""
    found: list[CallMismatch] = []
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
                found.append(CallMismatch(group, first, other))
                break
    return min(found, key=lambda one: one.first[1].created_ns, default=None)


def find_departure(evidence: HangEvidence, ranks: Iterable[int]) -> Departure | None:
    """The only one of these ranks that made a call which no rank ever made after such calls."""
    ranks_with_calls = [rank for rank in evidence.ranks if evidence.of(rank).calls]
    ranks_counted = [rank for rank in evidence.ranks if evidence.of(rank).is_only_counted]
    if len(ranks_with_calls) + len(ranks_counted) < len(evidence.ranks):
        return None
    numbers = _numbered(evidence, ranks_with_calls)
    others: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for rank, own in numbers.items():
        for at in range(SHORTEST_CONTEXT, len(own)):
            others.setdefault(tuple(own[at - SHORTEST_CONTEXT : at + 1]), []).append((rank, at))
    found, met = [], _met(evidence, numbers)
    for rank in set(ranks):
        calls, own = evidence.of(rank).calls, numbers.get(rank, [])
        for at, usual, length in _departures(own, _count_calls_before_meeting(calls, met)):
            made = others[tuple(own[at - SHORTEST_CONTEXT : at + 1])]
            if not any(
                other != rank and _common(numbers[other], before, own, at) >= length
                for other, before in made
            ):
                is_again = own[at] == own[at - 1] and not _goes_on_without(own, at, usual)
                meant = calls[at if is_again else usual]
                is_alike = is_again or (own[usual] == own[at - 1] and own[at] in own[:at])
                found.append(Departure(rank, calls[at], calls[usual], meant, calls[:at], is_alike))
                break
    return found[0] if len(found) == 1 else None


def are_usual(evidence: HangEvidence, ranks: Iterable[int]) -> bool:
    """Whether each of these ranks' last calls had followed what came before it, and nothing else had."""
    numbers = _numbered(evidence, ranks)
    met = _met(evidence, numbers)
    for rank, own in numbers.items():
        # A rank alone does not show that it met another.
        is_alone = len(numbers) == 1
        last = (
            len(own) - LONGEST_CONTEXT
            if is_alone
            else _count_calls_before_meeting(evidence.of(rank).calls, met)
        )
        start = max(last, SHORTEST_CONTEXT)
        pieces = [
            tuple(own[at - SHORTEST_CONTEXT : at + 1]) for at in range(SHORTEST_CONTEXT, len(own))
        ]
        seen = set(pieces[: start - SHORTEST_CONTEXT])
        if not seen or not seen.issuperset(pieces[start - SHORTEST_CONTEXT :]):
            return False
        if any(_departures(own, start)):
            return False
    return True


def usual_next(evidence: HangEvidence, rank: int, others: Iterable[int]) -> RecordedCall | None:
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


def _met(evidence: HangEvidence, numbers: Mapping[int, Sequence[int]]) -> set[tuple[str, int]]:
    """Collectives of all ranks, by group and number, that all of them made and completed in order.

    Of equal calls in a row only the first shows that: ranks may be one apart in the others. Where
    another rank left no calls, it must not be the last of its group, nor the first of its kind: one
    that failed counts as completed, too.
    """
    found: set[tuple[str, int]] = set()
    firsts = {
        rank: {
            (call.group, call.number)
            for at, call in enumerate(evidence.of(rank).calls)
            if at and own[at] != own[at - 1]
        }
        for rank, own in numbers.items()
    }
    for group in evidence.groups.values():
        if len(group.ranks) < len(evidence.everybody):
            continue
        of_all = {rank: evidence.of(rank).collectives(group.name) for rank in numbers}
        end = min(max(calls, default=0) for calls in of_all.values())
        has_all, seen = len(numbers) == len(group.ranks), set[Signature]()
        for number in sorted({number for calls in of_all.values() for number in calls}):
            calls = [made[number] for made in of_all.values() if number in made]
            kinds = {call.signature for call in calls}
            # At start-up ranks come to a call of all by ways of their own.
            if len(kinds) > 1 and place_of(calls[0].frames).part != START_UP:
                break
            is_whole = len(calls) == len(of_all) and all(call.is_done for call in calls)
            is_shown = has_all or (number < end and kinds <= seen)
            key = group.name, number
            if (
                len(kinds) == 1
                and is_whole
                and is_shown
                and all(key in each for each in firsts.values())
            ):
                found.add(key)
            seen |= kinds
    return found


def _count_calls_before_meeting(calls: Sequence[RecordedCall], met: Set[tuple[str, int]]) -> int:
    """So many of a rank's calls were made before the last one in which all ranks met."""
    at = [
        index
        for index, call in enumerate(calls)
        if (call.group, call.number) in met and not call.is_point_to_point
    ]
    return at[-1] + 1 if at else 0


def _numbered(evidence: HangEvidence, ranks: Iterable[int]) -> dict[int, list[int]]:
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
    lengths: dict[int, int] = {}
    for at in range(SHORTEST_CONTEXT, len(numbers)):
        earlier = seen.setdefault(tuple(numbers[at - SHORTEST_CONTEXT : at]), [])
        # One more than before the calls that precede both places.
        lengths = {
            before: min(lengths.get(before - 1, SHORTEST_CONTEXT - 1) + 1, LONGEST_CONTEXT)
            for before in earlier
        }
        if at >= start and earlier:
            longest = max(lengths.values())
            followers = {
                numbers[before]: before for before in earlier if lengths[before] == longest
            }
            if numbers[at] not in followers:
                yield at, max(followers.values()), longest
        earlier.append(at)


def _goes_on_without(own: Sequence[int], at: int, usual: int) -> bool:
    """Whether what follows fits a call that was left out better than one that was made again."""
    left_out = _common_after(own[at:], own[usual + 1 : at])
    return left_out > 1 + _common_after(own[at + 1 :], own[usual:at])


def _common_after(one: Sequence[int], other: Sequence[int]) -> int:
    """How many calls from the beginning on are alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _common(one: Sequence[int], at: int, other: Sequence[int], there: int) -> int:
    """How many calls before the two places are alike."""
    most = min(at, there, LONGEST_CONTEXT)
    return next((n for n in range(most) if one[at - 1 - n] != other[there - 1 - n]), most)
