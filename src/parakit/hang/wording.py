"""Calls, ranks and waits in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parakit.formatting.units import joined
from parakit.hang.evidence import HangEvidence, RankEvidence, RecordedCall
from parakit.hang.place import place_of
from parakit.hang.waits import TORCH_DISTRIBUTED, Wait, is_in_collective

MOST_STATES = 12
"""Statements of one sentence on where ranks are; the rest is counted."""


def described(call: RecordedCall) -> str:
    """Return the part of a call that ranks must agree on: `all_reduce of [4] Float`."""
    sizes = " and ".join(str(list(size)) for size in call.sizes) or "nothing"
    return f"{call.operation} of {sizes}{' ' + '/'.join(call.dtypes) if call.dtypes else ''}"


def who_waits(waits: Sequence[Wait]) -> str:
    """`ranks 1 and 2 wait`."""
    ranks = {wait.rank for wait in waits}
    return f"{ranks_of(ranks)} wait{'s' * (len(ranks) == 1)}"


def where_of(evidence: HangEvidence, wait: Wait) -> str:
    """The call in which it waits, and its group."""
    if wait.call is None:
        return "an exchange between stages"
    return f"{wait.call} of the {evidence.groups[wait.call.group].label}"


def describe_ranks(evidence: HangEvidence) -> str:
    """Return a sentence that says where each rank is: in which call and group, or on which line.

    Ranks at the same place share a statement, at most MOST_STATES of them. Ranks that left nothing come
    last. The sentence is empty if no rank is known.
    """
    ranks_by_state: dict[str, list[int]] = {}
    for rank in sorted(evidence.everybody):
        state = _describe_state(evidence, evidence.of(rank))
        ranks_by_state.setdefault(state, []).append(rank)
    if silent := ranks_by_state.pop(LEFT_NOTHING, []):
        ranks_by_state[LEFT_NOTHING] = silent
    statements = [
        f"{ranks_of(ranks)} {_make_plural(state) if len(ranks) > 1 else state}"
        for state, ranks in ranks_by_state.items()
    ]
    more = len(statements) - MOST_STATES
    shown = statements[:MOST_STATES] + ([f"{more} more places"] if more > 0 else [])
    text = "; ".join(shown)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


LEFT_NOTHING = "left nothing"


def _make_plural(state: str) -> str:
    return f"are {state.removeprefix('is ')}" if state.startswith("is ") else state


def _describe_state(evidence: HangEvidence, rank_evidence: RankEvidence) -> str:
    """Return the unfinished call of a rank, else its place by its stack, as a predicate with `is`."""
    if rank_evidence.pending:
        call = rank_evidence.pending[0]
        return f"is in {call} of the {evidence.groups[call.group].label}"
    if rank_evidence.stack:
        step = place_of(rank_evidence.stack)
        functions = [
            frame.function for frame in rank_evidence.stack if TORCH_DISTRIBUTED in frame.file
        ]
        if is_in_collective(rank_evidence.stack) and functions:
            return f"is in {functions[0]}, called in {step}"
        return f"is in {step}"
    return "is in no unfinished call" if rank_evidence.is_known else LEFT_NOTHING


def ranks_of(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 5`: at most eight of them."""
    found = sorted(ranks)
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {listed(found)}"


def listed(ranks: Sequence[int]) -> str:
    """`1, 2 and 5`: at most eight of them."""
    more = [f"{len(ranks) - 8} more"] if len(ranks) > 8 else []
    return joined([*map(str, ranks[:8]), *more])
