"""Describe calls, ranks and waits in the words of a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parakit.formatting.units import joined
from parakit.hang.evidence import HangEvidence, RankEvidence, RecordedCall
from parakit.hang.place import locate_frames
from parakit.hang.waits import TORCH_DISTRIBUTED, Wait, is_in_collective

MOST_STATES = 12
"""Most statements of the sentence on where ranks are; further ones are counted."""
SHOWN_RANKS = 8
"""Most ranks that a list names; further ones are counted."""


def describe_call(call: RecordedCall) -> str:
    """Return the part of a call that ranks must agree on: `all_reduce of [4] Float`, or `barrier`."""
    sizes = " and ".join(str(list(size)) for size in call.sizes)
    description = " ".join(filter(None, (sizes, "/".join(call.dtypes))))
    return f"{call.operation} of {description}" if description else call.operation


def describe_waiting_ranks(waits: Sequence[Wait]) -> str:
    """Return who waits, such as `ranks 1 and 2 wait`; at most SHOWN_RANKS are named."""
    ranks = {wait.rank for wait in waits}
    return f"{format_ranks(ranks)} wait{'s' * (len(ranks) == 1)}"


def describe_wait_call(evidence: HangEvidence, wait: Wait) -> str:
    """Return the call in which a rank waits and its group: `all_reduce no. 3 of the pipeline group`."""
    if wait.call is None:
        return "an exchange between stages"
    return f"{wait.call} of the {evidence.groups[wait.call.group].label}"


def describe_ranks(evidence: HangEvidence) -> str:
    """Return a sentence that says where each rank is: its call and group, or its source line.

    Ranks in the same state share a statement, and at most MOST_STATES statements are written. Ranks without
    evidence come last. The sentence is empty if no rank is known.
    """
    ranks_by_state: dict[str, list[int]] = {}
    for rank in sorted(evidence.all_ranks):
        state = _describe_state(evidence, evidence.get_rank(rank))
        ranks_by_state.setdefault(state, []).append(rank)
    silent_ranks = ranks_by_state.pop(LEFT_NOTHING, [])
    if silent_ranks:
        ranks_by_state[LEFT_NOTHING] = silent_ranks
    statements = [
        f"{format_ranks(ranks)} {_make_plural(state) if len(ranks) > 1 else state}"
        for state, ranks in ranks_by_state.items()
    ]
    num_hidden = len(statements) - MOST_STATES
    shown = statements[:MOST_STATES] + ([f"{num_hidden} more places"] if num_hidden > 0 else [])
    text = "; ".join(shown)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


LEFT_NOTHING = "left nothing"
"""State of a rank without evidence."""


def _make_plural(state: str) -> str:
    """Return the state of one rank as that of several: `is in …` becomes `are in …`."""
    return f"are {state.removeprefix('is ')}" if state.startswith("is ") else state


def _describe_state(evidence: HangEvidence, rank_evidence: RankEvidence) -> str:
    """Return where a rank is, as a predicate that begins with `is in`.

    It names the rank's unfinished call, or else the location of its stack.
    """
    if rank_evidence.pending:
        call = rank_evidence.pending[0]
        group = evidence.groups[call.group]
        article = "a" if group.is_unknown else "the"
        location = str(locate_frames(call.frames)) if call.frames else ""
        called_in = f", called in {location}" if location else ""
        return f"is in {call} of {article} {group.label}{called_in}"
    if rank_evidence.stack:
        step = locate_frames(rank_evidence.stack)
        functions = [
            frame.function for frame in rank_evidence.stack if TORCH_DISTRIBUTED in frame.file
        ]
        if is_in_collective(rank_evidence.stack) and functions:
            return f"is in {functions[0]}, called in {step}"
        return f"is in {step}"
    for name, progress in rank_evidence.progress.items():
        if progress.entered > progress.completed:
            label = evidence.groups[name].label if name in evidence.groups else f"group {name}"
            return f"is in collective no. {progress.completed + 1} of the {label}"
    begun_call = evidence.begun.get(rank_evidence.rank)
    if begun_call is not None and not rank_evidence.is_known:
        return describe_begun_call(begun_call)
    return "is in no unfinished call" if rank_evidence.is_known else LEFT_NOTHING


def describe_begun_call(call: RecordedCall) -> str:
    """Return the predicate on the last call that a rank began: `began all_reduce of [4] Float no. 7 last`."""
    return f"began {describe_call(call)} no. {call.number} last"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 1, 2 and 5` in rising order; at most SHOWN_RANKS are named."""
    sorted_ranks = sorted(ranks)
    if len(sorted_ranks) == 1:
        return f"rank {sorted_ranks[0]}"
    return f"ranks {join_ranks(sorted_ranks)}"


def join_ranks(ranks: Sequence[int]) -> str:
    """Return `1, 2 and 5`; at most SHOWN_RANKS are named, and the others counted (`and 4 more`)."""
    names = [str(rank) for rank in ranks[:SHOWN_RANKS]]
    if len(ranks) > SHOWN_RANKS:
        names.append(f"{len(ranks) - SHOWN_RANKS} more")
    return joined(names)
