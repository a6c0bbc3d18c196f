"""Where in the step a rank, a call or what left the order is: by stacks, or by what usually follows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from parakit.hang.evidence import HangEvidence, RecordedCall
from parakit.hang.order import Departure, usual_next
from parakit.hang.place import StepPlace, place_of, place_of_call
from parakit.hang.waits import Waits


def place_of_a_call(evidence: HangEvidence, call: RecordedCall) -> StepPlace:
    """By the calls of the rank that made it."""
    for one in evidence.ranks.values():
        if at := [number for number, made in enumerate(one.calls) if made is call]:
            return place_of_call(one.calls, at[0], evidence.stage)
    return place_of(call.frames)


def place_of_rank(waits: Waits, rank: int) -> StepPlace:
    """By its stack; where that names no module, or none is here, by what usually follows its calls."""
    one = waits.evidence.of(rank)
    place = place_of(one.stack)
    if place.is_known:
        return place
    usual = usual_next(waits.evidence, rank, [wait.rank for wait in waits.calls_into([rank])])
    if usual is None:
        return place
    following = _place_after(waits.evidence, one.calls, usual)
    return following if place.part in ("", following.part) else place


def place_of_departure(evidence: HangEvidence, left: Departure) -> StepPlace:
    """Of the call that was made once more, or left out."""
    place = _place_after(evidence, left.before, left.meant)
    alike = takewhile(lambda call: call.signature == left.meant.signature, reversed(left.before))
    ends = (len(left.before) - 1 - back for back, _ in enumerate(alike))
    modules = {place_of_call(left.before, at, evidence.stage).module for at in ends}
    # Which of equal calls in a row was made again or left out is not seen.
    return place_of(left.meant.frames) if left.is_alike and modules - {place.module} else place


def _place_after(
    evidence: HangEvidence, calls: Sequence[RecordedCall], following: RecordedCall
) -> StepPlace:
    return place_of_call((*calls, following), len(calls), evidence.stage)
