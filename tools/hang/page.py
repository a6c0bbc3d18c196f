"""One page that opens offline: the verdict, and each group's last calls, a row a rank."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from tools.hang.evidence import Evidence, GroupOfRanks, RecordedCall
from tools.hang.place import place_of
from tools.hang.verdict import Verdict

SHOWN_CALLS, SHOWN_RANKS, SHOWN_GROUPS = 12, 64, 40

_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;"
    "margin:2rem auto;padding:0 1rem}table{border-collapse:collapse;font-size:.85em}"
    "td,th{border:1px solid #8886;padding:.15rem .5rem;text-align:left;white-space:nowrap}"
    "div{overflow-x:auto}.waits{background:#e8a33d55}.absent{background:#d33c3c55}"
    ".culprit{font-weight:700;color:#c22}"
)


def page_of(evidence: Evidence, verdict: Verdict) -> str:
    """The page's HTML."""
    chain = "".join(f"<li>{escape(one)}</li>" for one in verdict.chain)
    kind = f"<p>{escape(verdict.kind)}. {escape(verdict.next_step)}</p>" if verdict.kind else ""
    groups = "".join(_groups(evidence, verdict))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Why it hangs</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(verdict.verdict.capitalize())}</h1>"
        f"<p><strong>{escape(verdict.sentence)}</strong></p>{kind}<ul>{chain}</ul>"
        '<p>Each column is a call of the group; <span class="waits">in it, not done</span>, '
        f'<span class="absent">not entered</span>.</p>{groups}</body></html>\n'
    )


def _groups(evidence: Evidence, verdict: Verdict) -> Iterator[str]:
    """Those in which somebody waits first."""
    waited = {call.group for one in evidence.ranks.values() for call in one.pending}
    found = [group for group in evidence.groups.values() if len(group.ranks) > 1]
    found.sort(key=lambda group: (group.name not in waited, group.ranks))
    for group in found[:SHOWN_GROUPS]:
        rows = _calls(evidence, group)
        numbers = sorted({number for calls in rows.values() for number in calls})[-SHOWN_CALLS:]
        if not numbers:
            continue
        head = "".join(f"<th>no. {number}</th>" for number in numbers)
        body = "".join(_row(verdict, rank, rows[rank], numbers) for rank in _shown(group, verdict))
        title = f"{group.label}: {len(group.ranks)} ranks"
        table = f"<table><tr><th>rank</th>{head}</tr>{body}</table>"
        yield f"<h2>{escape(title.capitalize())}</h2><div>{table}</div>"


def _shown(group: GroupOfRanks, verdict: Verdict) -> list[int]:
    named = {*verdict.culprits, *verdict.suspects}
    return sorted(sorted(group.ranks, key=lambda rank: rank not in named)[:SHOWN_RANKS])


def _calls(evidence: Evidence, group: GroupOfRanks) -> dict[int, dict[int, RecordedCall]]:
    return {
        rank: {
            call.number: call
            for call in evidence.of(rank).calls
            if call.group == group.name and not call.is_point_to_point
        }
        for rank in group.ranks
    }


def _row(verdict: Verdict, rank: int, calls: dict[int, RecordedCall], numbers: list[int]) -> str:
    named = ' class="culprit"' if rank in verdict.culprits else ""
    cells = "".join(_cell(calls.get(number)) for number in numbers)
    return f"<tr><th{named}>{rank}</th>{cells}</tr>"


def _cell(call: RecordedCall | None) -> str:
    if call is None:
        return '<td class="absent"></td>'
    sizes = ", ".join("×".join(map(str, size)) for size in call.sizes)
    tip = escape(f"{sizes} {' '.join(call.dtypes)}, {place_of(call.frames)}", quote=True)
    waits = "" if call.is_done else ' class="waits"'
    return f'<td{waits} title="{tip}">{escape(call.operation)}</td>'
