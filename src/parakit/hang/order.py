"""Find the rank that left the usual order of calls.

Training repeats the same calls in every iteration, and its ranks make similar calls. The norm is therefore what
a rank did before, and what the other ranks did. The calls before a call are its context: a call is usual if it
followed an equal context before. Calls are equal if their signatures are (`RecordedCall.signature`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from parakit.hang.evidence import (
    UNKNOWN_OPERATION,
    UNNAMED_GROUP,
    GroupOfRanks,
    HangEvidence,
    RecordedCall,
    Signature,
)
from parakit.hang.place import is_outside_training

LONGEST_CONTEXT = 64
"""Most calls of a context that are compared."""
SHORTEST_CONTEXT = 3
"""Fewest calls of a context. What follows fewer calls is not taken for usual."""

_OPERATIONS_OF_ONE_SIZE = frozenset(
    {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier"}
)
"""Operations in which all ranks give a tensor of the same size."""

CallSequence = Sequence[int]
"""Calls of one rank in order, as numbers: equal calls have equal numbers."""
CollectiveKey = tuple[str, int]
"""Name of a group, and the number of a collective in the group."""


@dataclass(frozen=True)
class Departure:
    """A rank's departure from the usual order of calls: the call that it made, and the call that usually follows.

    No rank ever made this call after the same calls before.
    """

    rank: int
    call: RecordedCall
    usual: RecordedCall
    wrong_call: RecordedCall
    """The call that the rank made once more than usual (`call`), or left out (`usual`)."""
    calls_before: tuple[RecordedCall, ...]
    """The rank's calls before `call`."""
    is_among_equal_calls: bool
    """True if `wrong_call` is one of several equal calls in a row, so that its position is not known."""


@dataclass(frozen=True)
class CallMismatch:
    """Calls of two ranks that have the same number in the same group and cannot be one collective."""

    group: GroupOfRanks
    first: tuple[int, RecordedCall]
    second: tuple[int, RecordedCall]

    @property
    def differs(self) -> str:
        """First difference between the calls: operation, dtype, size, number or place in the code."""
        first_call, second_call = self.first[1], self.second[1]
        if first_call.operation != second_call.operation:
            return "operation"
        # A log has no dtypes, and torch's report on one of the calls may have neither dtype nor size.
        if first_call.dtypes and second_call.dtypes and first_call.dtypes != second_call.dtypes:
            return "dtype"
        if first_call.sizes != second_call.sizes:
            return "size"
        return "number" if first_call.number != second_call.number else "place in the code"


class _Deviation(NamedTuple):
    """A call of a rank that never followed the calls before it, and the position of the call that usually did."""

    position: int
    """Index of the call in the rank's sequence."""
    usual_position: int
    context_length: int
    """Calls of the longest context that came before this call and before another call."""


def find_mismatch(evidence: HangEvidence) -> CallMismatch | None:
    """Return the earliest pair of calls that differ in operation, size or dtype; None if all calls fit together.

    Calls that torch itself compared and found to differ come first. Calls in groups without a name are not
    compared.
    """
    if evidence.compared:
        first, second = sorted(evidence.compared[0], key=lambda rank_and_call: rank_and_call[0])
        return CallMismatch(evidence.groups[first[1].group], first, second)
    mismatches: list[CallMismatch] = []
    for group in evidence.groups.values():
        if group.name == UNNAMED_GROUP:
            continue
        calls_by_number: dict[int, list[tuple[int, RecordedCall]]] = {}
        for rank in group.ranks:
            # Calls that a coalescing manager joins share one number: the last of them is compared.
            for number, call in evidence.get_rank(rank).collectives(group.name).items():
                calls_by_number.setdefault(number, []).append((rank, call))
        mismatch = _find_mismatch_in_group(group, calls_by_number)
        if mismatch:
            mismatches.append(mismatch)
    return min(mismatches, key=lambda mismatch: mismatch.first[1].created_ns, default=None)


def _find_mismatch_in_group(
    group: GroupOfRanks, calls_by_number: Mapping[int, Sequence[tuple[int, RecordedCall]]]
) -> CallMismatch | None:
    """Return the mismatch with the lowest number in the group; None if all calls fit."""
    for _, ranks_and_calls in sorted(calls_by_number.items()):
        first = ranks_and_calls[0]
        for second in ranks_and_calls[1:]:
            if not _fit_together(first[1], second[1]):
                return CallMismatch(group, first, second)
    return None


def find_departure(evidence: HangEvidence, ranks: Iterable[int]) -> Departure | None:
    """Return the departure from the usual order of calls, if exactly one rank of `ranks` left this order.

    Only calls after the last collective that all ranks completed are searched. None means that no rank or several
    ranks left the order, or that calls of a rank are missing.
    """
    ranks_with_calls = [rank for rank in evidence.ranks if evidence.get_rank(rank).calls]
    ranks_counted = [rank for rank in evidence.ranks if evidence.get_rank(rank).is_only_counted]
    if len(ranks_with_calls) + len(ranks_counted) < len(evidence.ranks):
        return None
    sequences = _number_calls(evidence, ranks_with_calls)
    positions = _index_short_contexts(sequences)
    completed_by_all = _find_collectives_completed_by_all(evidence, sequences)
    departures = []
    for rank in set(ranks):
        calls, sequence = evidence.get_rank(rank).calls, sequences.get(rank, [])
        start = _count_calls_up_to_last(calls, completed_by_all)
        for deviation in _find_deviations(sequence, start):
            if not _did_another_rank(rank, deviation, sequences, positions):
                departures.append(_make_departure(rank, calls, sequence, deviation))
                break
    return departures[0] if len(departures) == 1 else None


def _index_short_contexts(
    sequences: Mapping[int, CallSequence],
) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Return where each short sequence of calls occurs, as pairs of a rank and an index.

    A key is the numbers of SHORTEST_CONTEXT calls and of the next call. The index is that of the next call.
    """
    positions: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for rank, sequence in sequences.items():
        for index in range(SHORTEST_CONTEXT, len(sequence)):
            key = _cut_short_context(sequence, index)
            positions.setdefault(key, []).append((rank, index))
    return positions


def _cut_short_context(sequence: CallSequence, index: int) -> tuple[int, ...]:
    """Return the SHORTEST_CONTEXT calls before `index`, and the call at `index`."""
    return tuple(sequence[index - SHORTEST_CONTEXT : index + 1])


def _did_another_rank(
    rank: int,
    deviation: _Deviation,
    sequences: Mapping[int, CallSequence],
    positions: Mapping[tuple[int, ...], Sequence[tuple[int, int]]],
) -> bool:
    """Return True if another rank made the same call as the deviation, after the same calls before it.

    At least `deviation.context_length` calls before it must be equal on both ranks. The call is then usual for
    the job, though not for this rank.

    Args:
        rank: Rank of the deviation.
        deviation: A call that never followed its context on this rank.
        sequences: Calls of each rank.
        positions: Ranks and indexes at which each short context occurs (`_index_short_contexts`).
    """
    sequence, index = sequences[rank], deviation.position
    for other_rank, other_index in positions[_cut_short_context(sequence, index)]:
        if other_rank == rank:
            continue
        length = _count_equal_before(sequences[other_rank], other_index, sequence, index)
        if length >= deviation.context_length:
            return True
    return False


def _make_departure(
    rank: int, calls: tuple[RecordedCall, ...], sequence: CallSequence, deviation: _Deviation
) -> Departure:
    """Return a deviation as a departure, which states whether the rank repeated a call or left one out."""
    index, usual_index, _ = deviation
    is_equal_to_previous = sequence[index] == sequence[index - 1]
    is_repeated = is_equal_to_previous and not _was_call_left_out(sequence, index, usual_index)
    # A call that was left out among equal calls, such as the same call of every layer.
    is_left_out_of_row = (
        sequence[usual_index] == sequence[index - 1] and sequence[index] in sequence[:index]
    )
    return Departure(
        rank=rank,
        call=calls[index],
        usual=calls[usual_index],
        wrong_call=calls[index] if is_repeated else calls[usual_index],
        calls_before=calls[:index],
        is_among_equal_calls=is_repeated or is_left_out_of_row,
    )


def follow_usual_order(evidence: HangEvidence, ranks: Iterable[int]) -> bool:
    """Return True if every rank of `ranks` made only usual calls since the last collective that all completed.

    A call is usual if the rank made it before after the same calls. A rank with too few earlier calls gives
    False.
    """
    sequences = _number_calls(evidence, ranks)
    completed_by_all = _find_collectives_completed_by_all(evidence, sequences)
    for rank, sequence in sequences.items():
        if len(sequences) == 1:
            # The calls of a single rank do not show which collectives another rank completed.
            start = len(sequence) - LONGEST_CONTEXT
        else:
            start = _count_calls_up_to_last(evidence.get_rank(rank).calls, completed_by_all)
        start = max(start, SHORTEST_CONTEXT)
        contexts = [
            _cut_short_context(sequence, index) for index in range(SHORTEST_CONTEXT, len(sequence))
        ]
        contexts_before = set(contexts[: start - SHORTEST_CONTEXT])
        contexts_since = contexts[start - SHORTEST_CONTEXT :]
        if not contexts_before or not contexts_before.issuperset(contexts_since):
            return False
        if any(_find_deviations(sequence, start)):
            return False
    return True


def find_usual_next_call(
    evidence: HangEvidence, rank: int, other_ranks: Iterable[int]
) -> RecordedCall | None:
    """Return the call that a rank would usually make next, by earlier calls of this rank and `other_ranks`.

    The earlier calls are searched for the longest sequence that equals the rank's last calls. The call after this
    sequence is returned. If several sequences are equally long, the latest is used. None means that no sequence
    of at least SHORTEST_CONTEXT calls is equal.
    """
    sequences = _number_calls(evidence, {rank, *other_ranks})
    sequence = sequences[rank]
    if not sequence:
        return None
    longest, usual_call = SHORTEST_CONTEXT, None
    for other_rank, other_sequence in sequences.items():
        for index in range(1, len(other_sequence)):
            if other_sequence[index - 1] != sequence[-1]:
                continue
            length = _count_equal_before(other_sequence, index, sequence, len(sequence))
            if length >= longest:
                longest, usual_call = length, evidence.get_rank(other_rank).calls[index]
    return usual_call


def _find_collectives_completed_by_all(
    evidence: HangEvidence, sequences: Mapping[int, CallSequence]
) -> set[CollectiveKey]:
    """Return the collectives of all ranks that every rank completed, in the same order.

    Of equal calls in a row only the first is returned, because the ranks may be one call apart in the others. A failed
    call also counts as completed. So if another rank left no calls, a collective is left out if it is the last of its
    group or the first of its signature.
    """
    first_of_row = {
        rank: _find_first_calls_of_rows(evidence.get_rank(rank).calls, sequence)
        for rank, sequence in sequences.items()
    }
    completed: set[CollectiveKey] = set()
    for group in evidence.groups.values():
        if len(group.ranks) < len(evidence.all_ranks):
            continue
        calls_by_rank = {
            rank: evidence.get_rank(rank).collectives(group.name) for rank in sequences
        }
        has_all_ranks = len(sequences) == len(group.ranks)
        for number in _find_completed_numbers(calls_by_rank, has_all_ranks=has_all_ranks):
            key = (group.name, number)
            if all(key in first_calls for first_calls in first_of_row.values()):
                completed.add(key)
    return completed


def _find_completed_numbers(
    calls_by_rank: Mapping[int, Mapping[int, RecordedCall]], *, has_all_ranks: bool
) -> Iterator[int]:
    """Yield, in rising order, the numbers of a group's collectives that every rank of `calls_by_rank` completed.

    The numbers end before the first collective in which the signatures of the ranks differ, unless that collective
    is outside of training.

    Args:
        calls_by_rank: Collectives of the group by rank and number.
        has_all_ranks: Whether all ranks of the group are in `calls_by_rank`. If some are not, a number is left out
            if no later number is common to the ranks, or if its signature is new.
    """
    last_common_number = min(max(calls, default=0) for calls in calls_by_rank.values())
    seen_signatures: set[Signature] = set()
    numbers = {number for calls in calls_by_rank.values() for number in calls}
    for number in sorted(numbers):
        calls = [calls[number] for calls in calls_by_rank.values() if number in calls]
        signatures = {call.signature for call in calls}
        # Outside of training, ranks may come to a common call from different places in the code.
        if len(signatures) > 1 and not is_outside_training(calls[0].frames):
            return
        has_every_call = len(calls) == len(calls_by_rank)
        is_done_by_all = has_every_call and all(call.is_done for call in calls)
        is_certain = has_all_ranks
        if not has_all_ranks:
            is_certain = number < last_common_number and signatures <= seen_signatures
        if len(signatures) == 1 and is_done_by_all and is_certain:
            yield number
        seen_signatures |= signatures


def _find_first_calls_of_rows(
    calls: Sequence[RecordedCall], sequence: CallSequence
) -> set[CollectiveKey]:
    """Return each call that differs from the call before it, as group and number."""
    return {
        (call.group, call.number)
        for index, call in enumerate(calls)
        if index and sequence[index] != sequence[index - 1]
    }


def _count_calls_up_to_last(calls: Sequence[RecordedCall], collectives: Set[CollectiveKey]) -> int:
    """Return how many calls a rank made up to its last call in `collectives`; 0 if it made none of them."""
    for index in range(len(calls) - 1, -1, -1):
        call = calls[index]
        if (call.group, call.number) in collectives and not call.is_point_to_point:
            return index + 1
    return 0


def _number_calls(evidence: HangEvidence, ranks: Iterable[int]) -> dict[int, list[int]]:
    """Return the calls of each rank as numbers. Calls with equal signatures have equal numbers on all ranks."""
    numbers: dict[Signature, int] = {}
    return {
        rank: [
            numbers.setdefault(call.signature, len(numbers))
            for call in evidence.get_rank(rank).calls
        ]
        for rank in ranks
    }


_NAMES_IN_LOGS = {"barrier": "all_reduce", "all_reduce_barrier": "all_reduce"}
"""Operations that NCCL's watchdog calls otherwise than a flight recorder."""


def _fit_together(first: RecordedCall, second: RecordedCall) -> bool:
    """Return True if two ranks' calls can be the same collective.

    A call from a log has no dtype, and sometimes no operation or size. Unknown values count as equal.
    """
    if UNKNOWN_OPERATION in (first.operation, second.operation):
        return True
    if first.dtypes and second.dtypes:
        if first.operation != second.operation:
            return False
        is_compared = first.operation in _OPERATIONS_OF_ONE_SIZE
        return not is_compared or (first.dtypes == second.dtypes and first.sizes == second.sizes)
    operations = {_NAMES_IN_LOGS.get(call.operation, call.operation) for call in (first, second)}
    if len(operations) > 1:
        return any("coalesced" in operation for operation in operations)
    if not (first.sizes and second.sizes and operations <= _OPERATIONS_OF_ONE_SIZE):
        return True
    return _count_elements(first) == _count_elements(second)


def _count_elements(call: RecordedCall) -> int:
    """Return the number of elements of a call's tensors, which is all that newer watchdogs report of sizes."""
    return sum(prod(size) for size in call.sizes)


def _find_deviations(sequence: CallSequence, start: int) -> Iterator[_Deviation]:
    """Yield the calls from index `start` on that never followed the longest context that occurred before.

    A context is the calls directly before a call. Each call is compared with the calls that followed the same
    context before, and the latest of those is the usual call.
    """
    indices_by_context: dict[tuple[int, ...], list[int]] = {}
    context_lengths: dict[int, int] = {}
    for index in range(SHORTEST_CONTEXT, len(sequence)):
        context = tuple(sequence[index - SHORTEST_CONTEXT : index])
        earlier_indices = indices_by_context.setdefault(context, [])
        # If the calls before two indices are equal, their contexts are one call longer than the contexts
        # of these calls, which the loop computed just before.
        context_lengths = {
            earlier: min(
                context_lengths.get(earlier - 1, SHORTEST_CONTEXT - 1) + 1, LONGEST_CONTEXT
            )
            for earlier in earlier_indices
        }
        if index >= start and earlier_indices:
            longest = max(context_lengths.values())
            index_by_follower = {
                sequence[earlier]: earlier
                for earlier in earlier_indices
                if context_lengths[earlier] == longest
            }
            if sequence[index] not in index_by_follower:
                yield _Deviation(index, max(index_by_follower.values()), longest)
        earlier_indices.append(index)


def _was_call_left_out(sequence: CallSequence, index: int, usual_index: int) -> bool:
    """Return True if the calls from `index` on fit a call left out better than a call made once more."""
    equal_if_left_out = _count_equal_from_start(sequence[index:], sequence[usual_index + 1 : index])
    equal_if_repeated = 1 + _count_equal_from_start(
        sequence[index + 1 :], sequence[usual_index:index]
    )
    return equal_if_left_out > equal_if_repeated


def _count_equal_from_start(first: CallSequence, second: CallSequence) -> int:
    """Return how many calls from the beginning on are equal in both sequences."""
    for index, (first_call, second_call) in enumerate(zip(first, second, strict=False)):
        if first_call != second_call:
            return index
    return min(len(first), len(second))


def _count_equal_before(
    first: CallSequence, first_index: int, second: CallSequence, second_index: int
) -> int:
    """Return how many calls directly before `first_index` equal those directly before `second_index`.

    The count goes backwards until the first two calls that differ, and ends at LONGEST_CONTEXT.
    """
    longest = min(first_index, second_index, LONGEST_CONTEXT)
    for length in range(longest):
        if first[first_index - 1 - length] != second[second_index - 1 - length]:
            return length
    return longest
