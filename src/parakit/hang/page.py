"""The page of `make why-hang ARGS="--page FILE"`: the verdict, and each group's last calls, a row a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from parakit.formatting.html import environment
from parakit.hang.evidence import GroupOfRanks, HangEvidence, RankEvidence, RecordedCall
from parakit.hang.place import StepPlace, place_of
from parakit.hang.verdict import HangVerdict
from parakit.hang.wording import described, ranks_of

SHOWN_CALLS, SHOWN_RANKS, SHOWN_GROUPS, OPEN_GROUPS = 12, 64, 40, 4

_TEMPLATES = Path(__file__).parent / "templates"


class TimelineCell(NamedTuple):
    """What one rank did in a call of a group."""

    state: str
    """`done`, `waits`, `absent`, `other`; empty where nothing is known."""
    text: str = ""
    tip: str = ""


class TimelineTable(NamedTuple):
    """A group's last calls, of each the one that most of its ranks made."""

    title: str
    columns: list[tuple[RecordedCall, StepPlace]]
    rows: list[tuple[int, list[TimelineCell]]]
    """By rank."""
    more: int
    """Ranks that have no row."""
    is_shown: bool


def render_page(evidence: HangEvidence, verdict: HangVerdict) -> str:
    """The whole page: groups in which somebody waits come first, of them those of who is named."""
    waited = {call.group for one in evidence.ranks.values() for call in one.pending}
    named = {*verdict.culprits, *verdict.suspects}
    found = [
        group
        for group in evidence.groups.values()
        if len(group.ranks) > 1 and any(_calls(evidence, group).values())
    ]
    found.sort(
        key=lambda one: (
            one.name not in waited,
            named.isdisjoint(one.ranks),
            len(one.ranks),
            one.ranks,
        )
    )
    tables = [
        _table(evidence, verdict, group, at < OPEN_GROUPS and group.name in waited)
        for at, group in enumerate(found[:SHOWN_GROUPS])
    ]
    template = environment(_TEMPLATES).get_template("hang.html.j2")
    return template.render(verdict=verdict, groups=tables, more=len(found) - len(tables))


def _calls(evidence: HangEvidence, group: GroupOfRanks) -> dict[int, dict[int, RecordedCall]]:
    return {rank: evidence.of(rank).collectives(group.name) for rank in group.ranks}


def _table(
    evidence: HangEvidence, verdict: HangVerdict, group: GroupOfRanks, is_shown: bool
) -> TimelineTable:
    """Its last calls; those that are named are among the ranks that have a row."""
    made = _calls(evidence, group)
    usual: list[RecordedCall] = []
    numbers = {number for calls in made.values() for number in calls}
    for number in sorted(numbers, reverse=True)[:SHOWN_CALLS]:
        calls = {rank: calls[number] for rank, calls in made.items() if number in calls}
        others = [call for rank, call in calls.items() if rank not in verdict.culprits]
        kinds = Counter(call.signature for call in others or calls.values())
        common, _ = kinds.most_common(1)[0]
        usual.append(next(call for call in calls.values() if call.signature == common))
    named = {*verdict.culprits, *verdict.suspects}
    shown = sorted(group.ranks, key=lambda rank: rank not in named)[:SHOWN_RANKS]
    rows = [
        (rank, [_cell(evidence.of(rank), made[rank], call) for call in usual])
        for rank in sorted(shown)
    ]
    columns = [(call, place_of(call.frames)) for call in usual]
    title = f"{group.label}: {ranks_of(group.ranks)}".capitalize()
    return TimelineTable(title, columns, rows, len(group.ranks) - len(shown), is_shown)


def _cell(one: RankEvidence, made: Mapping[int, RecordedCall], usual: RecordedCall) -> TimelineCell:
    call = made.get(usual.number)
    if call is None:
        is_absent = one.is_known and max(made, default=-1) < usual.number
        return TimelineCell("absent", "not entered") if is_absent else TimelineCell("")
    tip = f"{described(call)}, {place_of(call.frames)}"
    if call.signature[:-1] != usual.signature[:-1]:
        return TimelineCell("other", described(call), tip)
    return (
        TimelineCell("done", "done", tip) if call.is_done else TimelineCell("waits", "waits", tip)
    )
