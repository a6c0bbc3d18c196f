"""`make why-hang DUMPS=…`: the sentence, the chain, what to look at next, and a page for offline."""

from __future__ import annotations

import json as texts
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from tools.hang.evidence import Evidence, RecordedCall
from tools.hang.gather import gather
from tools.hang.place import place_of
from tools.hang.verdict import Outcome, Verdict, judge
from tools.records.io import write_whole
from tools.spec.files import ROOT

SHOWN_CALLS, SHOWN_RANKS, SHOWN_GROUPS = 12, 64, 40

_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;"
    "margin:2rem auto;padding:0 1rem}table{border-collapse:collapse;font-size:.85em}"
    "td,th{border:1px solid #8886;padding:.15rem .5rem;text-align:left;white-space:nowrap}"
    "div{overflow-x:auto}.waits{background:#e8a33d55}.absent{background:#d33c3c55}"
    ".culprit{font-weight:700;color:#c22}"
)


def why_hang(dumps: Sequence[str], json: bool = False, page: str | None = None) -> int:
    """Print the verdict, and write the page if one is named; 1 where the evidence does not decide.

    Raises:
        UnreadableError: Nothing there says anything of a rank; one sentence.
    """
    evidence = gather([ROOT / Path(text).expanduser() for text in dumps])
    found = judge(evidence)
    if json:
        print(texts.dumps(as_json(found)))
    else:
        kind = [f"Kind: {found.kind}. {found.next_step}"] if found.kind else []
        chain = [f"  {one}" for one in found.chain]
        watchdog = [f"Watchdog: {one}" for one in evidence.timed_out[:1]]
        print("\n".join([found.sentence, *kind, *chain, *watchdog]))
    if page:
        write_whole(ROOT / Path(page).expanduser(), _page(evidence, found))
    for sentence in evidence.refused:
        print(sentence, file=sys.stderr)
    return int(found.verdict is Outcome.UNDECIDED)


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The object that `JSON=1` prints."""
    return {name: value for name, value in asdict(verdict).items() if name != "chain"}


def _page(evidence: Evidence, verdict: Verdict) -> str:
    chain = "".join(f"<li>{escape(one)}</li>" for one in verdict.chain)
    kind = f"<p>{escape(verdict.kind)}. {escape(verdict.next_step)}</p>" if verdict.kind else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Why it hangs</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(verdict.verdict.capitalize())}</h1>"
        f"<p><strong>{escape(verdict.sentence)}</strong></p>{kind}<ul>{chain}</ul>"
        '<p>Each column is a call of the group; <span class="waits">in it, not done</span>, '
        f'<span class="absent">not entered</span>.</p>{"".join(_groups(evidence, verdict))}'
        "</body></html>\n"
    )


def _groups(evidence: Evidence, verdict: Verdict) -> Iterator[str]:
    """Those in which somebody waits first; a row a rank, those that are named among them."""
    waited = {call.group for one in evidence.ranks.values() for call in one.pending}
    found = [group for group in evidence.groups.values() if len(group.ranks) > 1]
    found.sort(key=lambda group: (group.name not in waited, group.ranks))
    named = {*verdict.culprits, *verdict.suspects}
    for group in found[:SHOWN_GROUPS]:
        rows = {rank: evidence.of(rank).collectives(group.name) for rank in group.ranks}
        numbers = sorted({number for calls in rows.values() for number in calls})[-SHOWN_CALLS:]
        if not numbers:
            continue
        body = "".join(f"<th>no. {number}</th>" for number in numbers)
        shown = sorted(group.ranks, key=lambda rank: rank not in named)[:SHOWN_RANKS]
        for rank in sorted(shown):
            title = ' class="culprit"' if rank in verdict.culprits else ""
            cells = "".join(_cell(rows[rank].get(number)) for number in numbers)
            body += f"</tr><tr><th{title}>{rank}</th>{cells}"
        title = f"{group.label}: {len(group.ranks)} ranks".capitalize()
        yield f"<h2>{escape(title)}</h2><div><table><tr><th>rank</th>{body}</tr></table></div>"


def _cell(call: RecordedCall | None) -> str:
    if call is None:
        return '<td class="absent"></td>'
    sizes = ", ".join("×".join(map(str, size)) for size in call.sizes)
    tip = escape(f"{sizes} {' '.join(call.dtypes)}, {place_of(call.frames)}", quote=True)
    waits = "" if call.is_done else ' class="waits"'
    return f'<td{waits} title="{tip}">{escape(call.operation)}</td>'
