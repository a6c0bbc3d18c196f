"""The page's main figure: a row's time as a bar with its interval, coloured by its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.report.analyse.entry import Entry
from tools.report.analyse.report import Report
from tools.report.render.sentences import compared_groups
from tools.report.render.tables import ratio
from tools.text.units import interval, number

MAX_ROWS = 24
"""Of a group; more are in the table."""
MAX_GROUPS = 6


@dataclass(frozen=True)
class Bar:
    """One row; places are in percent of the axis."""

    label: str
    verdict: str
    """`reference`, `faster`, `slower`, `within noise` or `too few samples`."""
    length: float
    low: float | None
    high: float | None
    text: str


@dataclass(frozen=True)
class BarGroup:
    """Rows that are compared with one another, on one axis."""

    title: str
    bars: tuple[Bar, ...]
    left_out: int
    spoken: str
    """The same in words."""


def bars_of(report: Report) -> list[BarGroup]:
    """Groups of rows that are compared, the largest first; without one the first row with a time."""
    groups = compared_groups(report)
    several = [members for members in groups if len(members) > 1]
    return [_group(members) for members in several[:MAX_GROUPS] or groups[:1]]


def _group(members: Sequence[Entry]) -> BarGroup:
    weights = [_weight(members[0], entry) for entry in members]
    equal = all(abs(weight - 1) < 1e-9 for weight in weights)
    found = [entry.estimate for entry in members if entry.estimate]  # Each has one.
    spans = [
        (weight * each.median, each.low and weight * each.low, each.high and weight * each.high)
        for each, weight in zip(found, weights, strict=True)
    ]
    axis = 1.02 * max(high or middle for middle, _, high in spans)
    bars = []
    for entry, (middle, low, high) in list(zip(members, spans, strict=True))[:MAX_ROWS]:
        compared = entry.speed.per_token if entry.speed else None
        text = f"{number(middle)} ms"
        text += f" [{interval(low, high)}]" if low is not None and high is not None else ""
        text += f", {ratio(compared)}" if compared else ""
        verdict = compared.verdict.value if compared else "reference"
        left, right = (end and 100 * end / axis for end in (low, high))
        bars.append(Bar(entry.label, verdict, 100 * middle / axis, left, right, text))
    run = members[0].run
    what = "of an iteration"
    if not equal:
        what = f"for as many tokens as an iteration of {members[0].label}"
    where = " · ".join(filter(None, (run.size, run.device)))
    title = f"Time {what}{f', {where}' if where else ''}"
    spoken = "; ".join(f"{bar.label}: {bar.text}" for bar in bars)
    return BarGroup(title, tuple(bars), max(0, len(members) - MAX_ROWS), spoken)


def _weight(reference: Entry, entry: Entry) -> float:
    """By which a row's time is multiplied, so that it is for as many tokens as the reference's."""
    found = entry.speed.per_token if entry.speed else None
    if found is None or not entry.time_ms or not reference.time_ms:
        return 1.0
    return found.ratio * reference.time_ms / entry.time_ms
