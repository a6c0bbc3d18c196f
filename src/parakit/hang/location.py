"""Find where in the training step a rank, a call or a departure from the order of calls is.

The location comes from stacks. If a stack names no module, the location is that of the call that usually follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from parakit.hang.evidence import HangEvidence, RecordedCall
from parakit.hang.order import Departure, find_usual_next_call
from parakit.hang.place import StepPlace, locate_call_in_step, locate_frames
from parakit.hang.waits import Waits


def locate_call(evidence: HangEvidence, call: RecordedCall) -> StepPlace:
    """Return the location in the training step at which a call was made.

    The layer and the micro batch are found by counting the earlier calls of the rank that made the call. If no
    rank's recorded calls contain `call` itself, the location is only that of the call's stack frames.
    """
    for state in evidence.ranks.values():
        # Ranks make equal calls, so the call itself is searched and not an equal one.
        for index, recorded_call in enumerate(state.calls):
            if recorded_call is call:
                return locate_call_in_step(state.calls, index, evidence.stage)
    return locate_frames(call.frames)


def locate_rank(waits: Waits, rank: int) -> StepPlace:
    """Return where in the step a rank is.

    The rank's stack shows it. If the rank has no stack, or the stack names no module, the location is that of the
    call that usually follows the rank's last call.
    """
    state = waits.evidence.get_rank(rank)
    location = locate_frames(state.stack)
    if location.is_known:
        return location
    waiting_ranks = [wait.rank for wait in waits.direct_waits_for([rank])]
    usual_call = find_usual_next_call(waits.evidence, rank, waiting_ranks)
    if usual_call is None:
        return location
    next_location = _locate_next_call(waits.evidence, state.calls, usual_call)
    return next_location if location.part in ("", next_location.part) else location


def locate_departure(evidence: HangEvidence, departure: Departure) -> StepPlace:
    """Return where in the step a rank repeated a call or left one out.

    If the call is one of several equal calls in a row from different modules, only the location in the call's
    stack frames is returned.
    """
    calls_before, wrong_call = departure.calls_before, departure.wrong_call
    location = _locate_next_call(evidence, calls_before, wrong_call)
    equal_calls = takewhile(
        lambda call: call.signature == wrong_call.signature, reversed(calls_before)
    )
    num_equal_calls = sum(1 for _ in equal_calls)
    last_index = len(calls_before) - 1
    modules = {
        locate_call_in_step(calls_before, last_index - offset, evidence.stage).module
        for offset in range(num_equal_calls)
    }
    if departure.is_among_equal_calls and modules - {location.module}:
        return locate_frames(wrong_call.frames)
    return location


def _locate_next_call(
    evidence: HangEvidence, calls: Sequence[RecordedCall], next_call: RecordedCall
) -> StepPlace:
    """Return where in the step `next_call` would be made after `calls`."""
    return locate_call_in_step((*calls, next_call), len(calls), evidence.stage)
