"""The page of `make why-hang ARGS="--page FILE"`: the verdict, and the last calls of each group.

Each group has a table with one row per rank and one column per call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from parakit.formatting.html import environment
from parakit.hang.evidence import GroupOfRanks, HangEvidence, RankEvidence, RecordedCall
from parakit.hang.place import StepPlace, locate_frames
from parakit.hang.verdict import HangVerdict
from parakit.hang.wording import describe_call, format_ranks

SHOWN_CALLS, SHOWN_RANKS, SHOWN_GROUPS, OPEN_GROUPS = 12, 64, 40, 4

_TEMPLATES = Path(__file__).parent / "templates"


class TimelineCell(NamedTuple):
    """State of one rank in one call of a group."""

    state: str
    """`done`, `waits`, `absent` or `other` (the rank made another call); empty if unknown."""
    text: str = ""
    tip: str = ""


class TimelineTable(NamedTuple):
    """Table of a group's last calls. Each column shows the call that most ranks made under one number."""

    title: str
    columns: list[tuple[RecordedCall, StepPlace]]
    rows: list[tuple[int, list[TimelineCell]]]
    """Ranks with their cells, in rising order."""
    more: int
    """Number of ranks without a row."""
    is_shown: bool
    """True if the table is unfolded at first."""


def render_page(evidence: HangEvidence, verdict: HangVerdict) -> str:
    """Return the verdict as an HTML page that loads nothing from the network.

    Groups in which a rank waits come first, then groups with a culprit or suspect. At most SHOWN_GROUPS groups
    are shown.
    """
    groups_with_waits = {call.group for state in evidence.ranks.values() for call in state.pending}
    named_ranks = {*verdict.culprits, *verdict.suspects}

    def sort_key(group: GroupOfRanks) -> tuple[bool, bool, int, tuple[int, ...]]:
        has_wait = group.name in groups_with_waits
        has_named_rank = not named_ranks.isdisjoint(group.ranks)
        return not has_wait, not has_named_rank, len(group.ranks), group.ranks

    groups = [
        group
        for group in evidence.groups.values()
        if len(group.ranks) > 1 and any(_collect_calls(evidence, group).values())
    ]
    groups.sort(key=sort_key)
    tables = []
    for index, group in enumerate(groups[:SHOWN_GROUPS]):
        is_shown = index < OPEN_GROUPS and group.name in groups_with_waits
        tables.append(_make_table(evidence, verdict, group, is_shown=is_shown))
    template = environment(_TEMPLATES).get_template("hang.html.j2")
    return template.render(verdict=verdict, groups=tables, more=len(groups) - len(tables))


def _collect_calls(
    evidence: HangEvidence, group: GroupOfRanks
) -> dict[int, dict[int, RecordedCall]]:
    """Return the collectives of a group by rank and number."""
    return {rank: evidence.get_rank(rank).collectives(group.name) for rank in group.ranks}


def _make_table(
    evidence: HangEvidence, verdict: HangVerdict, group: GroupOfRanks, *, is_shown: bool
) -> TimelineTable:
    """Return the table of a group's last SHOWN_CALLS calls, the last call first.

    At most SHOWN_RANKS ranks have a row. Culprits and suspects are chosen first.
    """
    calls_by_rank = _collect_calls(evidence, group)
    numbers = {number for calls in calls_by_rank.values() for number in calls}
    last_numbers = sorted(numbers, reverse=True)[:SHOWN_CALLS]
    usual_calls = [
        _find_usual_call(calls_by_rank, number, verdict.culprits) for number in last_numbers
    ]
    named_ranks = {*verdict.culprits, *verdict.suspects}
    shown_ranks = sorted(group.ranks, key=lambda rank: rank not in named_ranks)[:SHOWN_RANKS]
    rows = []
    for rank in sorted(shown_ranks):
        state, calls = evidence.get_rank(rank), calls_by_rank[rank]
        rows.append((rank, [_make_cell(state, calls, call) for call in usual_calls]))
    return TimelineTable(
        title=f"{group.label}: {format_ranks(group.ranks)}".capitalize(),
        columns=[(call, locate_frames(call.frames)) for call in usual_calls],
        rows=rows,
        more=len(group.ranks) - len(shown_ranks),
        is_shown=is_shown,
    )


def _find_usual_call(
    calls_by_rank: Mapping[int, Mapping[int, RecordedCall]], number: int, culprits: Sequence[int]
) -> RecordedCall:
    """Return the call that most ranks made under a number.

    Calls of `culprits` are used only if no other rank made a call under this number.
    """
    calls: list[RecordedCall] = []
    trusted_calls: list[RecordedCall] = []
    for rank, calls_of_rank in calls_by_rank.items():
        if number in calls_of_rank:
            calls.append(calls_of_rank[number])
            if rank not in culprits:
                trusted_calls.append(calls_of_rank[number])
    counts = Counter(call.signature for call in trusted_calls or calls)
    usual_signature, _ = counts.most_common(1)[0]
    return next(call for call in calls if call.signature == usual_signature)


def _make_cell(
    state: RankEvidence, calls: Mapping[int, RecordedCall], usual_call: RecordedCall
) -> TimelineCell:
    """Return a rank's cell in the column of `usual_call`.

    The cell shows that the call is done, that the rank waits in it, that the rank made another call, or that the
    rank has not entered it. The cell is empty if this is not known.
    """
    call = calls.get(usual_call.number)
    if call is None:
        is_absent = state.is_known and max(calls, default=-1) < usual_call.number
        return TimelineCell("absent", "not entered") if is_absent else TimelineCell("")
    tip = f"{describe_call(call)}, {locate_frames(call.frames)}"
    # The last part of a signature is the place in the code, from which equal calls may differ.
    if call.signature[:-1] != usual_call.signature[:-1]:
        return TimelineCell("other", describe_call(call), tip)
    return (
        TimelineCell("done", "done", tip) if call.is_done else TimelineCell("waits", "waits", tip)
    )
