"""The report in a few words and in one figure: what is fastest, by how much, what the others pay for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parakit.formatting.units import interval, joined, number, plural
from parakit.reporting.analyse.comparability import compare_speed
from parakit.reporting.analyse.earlier import UNDECIDED
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.report import Report
from parakit.reporting.analyse.statistics import TimeVerdict, adjust_verdicts
from parakit.reporting.render.sentences import (
    MAX_NAMED,
    group_compared_rows,
    join_first_names,
    judged_ratio,
    token_ratio,
    withheld_sentences,
    write_sentences,
)
from parakit.reporting.render.tables import format_speed

_MAX_GROUPS = 3
_MAX_COSTS = 3


def write_headline(report: Report, paid: Mapping[str, tuple[str, str]] = {}) -> str:
    """The report in a few words: what changed, else what is fastest and what the others pay for.

    Args:
        report: The report.
        paid: How much a run pays beyond baseline's share, and for what most, by its name.
    """
    if report.baseline:
        return _against_earlier(report)
    timed = [entry for entry in report.entries if entry.estimate]
    if not timed:
        return write_sentences(report)[0]
    groups = [members for members in group_compared_rows(report) if len(members) > 1]
    if not groups:
        if len(timed) > 1 and (withheld := withheld_sentences(report)):
            return " ".join(withheld)
        if len(timed) > 1:
            times = join_first_names(
                [f"{number(each.time_ms)} ms ({each.label})" for each in timed]
            )
            return f"None of {len(timed)} rows compares with another. An iteration takes {times}."
        (one,) = timed
        rate = one.rates.tokens_per_second
        each = f", {number(rate)} tokens/s" if rate else ""
        return f"{one.label} takes {number(one.time_ms)} ms an iteration{each}."
    told = [_fastest(members, paid) for members in groups[:_MAX_GROUPS]]
    if len(groups) > _MAX_GROUPS:
        told.append(f"{len(groups) - _MAX_GROUPS} more groups are under 'Compared in speed'.")
    return " ".join(told)


def _against_earlier(report: Report) -> str:
    changed = list(dict.fromkeys(c.row for c in report.changes if c.fails_strict))
    undecided = [
        f"{c.row} ({c.text.rpartition(': ')[2]})" for c in report.changes if c.kind == UNDECIDED
    ]
    open_ = f" Undecided is {join_first_names(undecided)}; repeat the runs." if undecided else ""
    if changed:
        rows = plural(len(changed), "row")
        return f"Against {report.baseline}, {rows} changed: {join_first_names(changed)}.{open_}"
    return f"Nothing {'else ' if undecided else ''}changed against {report.baseline}.{open_}"


def _fastest(members: Sequence[Entry], paid: Mapping[str, tuple[str, str]]) -> str:
    """The fastest row of a group, by how much, and what the others pay for."""
    reference, *others = members
    best = min(others, key=judged_ratio)
    verdicts = [e.judged_time.verdict for e in others if e.judged_time]
    is_per_device = any(e.speed and e.speed.per_device_token for e in others)
    per_device = " per device" if is_per_device else ""
    if TimeVerdict.FASTER in verdicts:
        # Rows that the runs do not show to be slower than the one of the lowest time.
        rest = [entry for entry in members if entry is not best]
        pairs = [compare_speed(best.configuration, each.configuration).judged_time for each in rest]
        found = zip(rest, adjust_verdicts([pair for pair in pairs if pair]), strict=True)
        near = [each.label for each, pair in found if pair.verdict is not TimeVerdict.SLOWER]
        tied = f", with {join_first_names(near)} within noise of it" if near else ""
        text = (
            f"{best.label} is the fastest of {len(members)} rows{per_device}{tied}:"
            f" {number(best.time_ms)} ms an iteration, {_times(best)} of {reference.label}."
        )
        if best.speed and best.speed.model_doubt:
            text += f" T{best.speed.model_doubt[1:]}."
    else:
        counts = [(verdicts.count(verdict), verdict) for verdict in TimeVerdict]
        told = joined(
            [
                f"{count} {'with ' * (verdict is TimeVerdict.UNKNOWN)}{verdict}"
                for count, verdict in counts
                if count
            ]
        )
        alone = verdicts.count(TimeVerdict.NOISE) == len(others)
        of = f"{reference.label} ({number(reference.time_ms)} ms an iteration)"
        result = "all within noise" if alone else told
        text = f"Of {len(members)} rows none is faster{per_device} than {of}: {result}."
    # Those that pay for the same together.
    parts: dict[str, list[str]] = {}
    for entry in others:
        if entry.run.name in paid and entry is not best:
            amount, part = paid[entry.run.name]
            parts.setdefault(part, []).append(f"{entry.label} {amount}")
    if not parts:
        return text
    most = sorted(parts.items(), key=lambda each: -len(each[1]))[:_MAX_COSTS]
    costs = "; ".join(f"{joined(payers[:MAX_NAMED])} for {part}" for part, payers in most)
    return f"{text} Beyond baseline's share of the work they pay: {costs}."


def _times(entry: Entry) -> str:
    """Return `×0.900 the time a token`, with the device time where the numbers of devices differ."""
    speed = entry.speed
    if speed is None or speed.per_device_token is None:
        return f"×{token_ratio(entry):.3f} the time a token"
    return (
        f"×{speed.per_device_token.ratio:.3f} the device time a token"
        f" (×{token_ratio(entry):.3g} the time)"
    )


def headline_and_sentences(headline: str, report: Report) -> list[str]:
    """The headline and the verdicts after it."""
    return list(dict.fromkeys((headline, *write_sentences(report))))


MAX_ROWS = 24
"""Of a group; more are in the table."""
MAX_GROUPS = 6


@dataclass(frozen=True)
class HeadlineBar:
    """One row, in milliseconds for as many tokens as the reference's."""

    label: str
    verdict: str
    """`reference`, `faster`, `slower`, `within noise` or `too few samples`."""
    time: float
    interval: tuple[float, float] | None
    text: str


@dataclass(frozen=True)
class BarGroup:
    """Rows that are compared with one another, on one axis."""

    title: str
    bars: tuple[HeadlineBar, ...]
    left_out: int
    axis: float
    """Its length in milliseconds."""


def build_bar_groups(report: Report) -> list[BarGroup]:
    """Groups of rows that are compared, the largest first; of one row alone that row."""
    groups = group_compared_rows(report)
    several = [members for members in groups if len(members) > 1]
    alone = groups if len(groups) == 1 else []
    return [_group(members) for members in several[:MAX_GROUPS] or alone]


def _group(members: Sequence[Entry]) -> BarGroup:
    reference, equal, bars = members[0], True, []
    for entry in members:
        pair, own = entry.judged_time, entry.time_ms or 0.0
        weight = token_ratio(entry) * (reference.time_ms or 0.0) / own
        equal = equal and abs(weight - 1) < 1e-9
        span = entry.interval and (weight * entry.interval[0], weight * entry.interval[1])
        text = f"{number(weight * own)} ms"
        text += f" [{interval(*span)}]" if span else ""
        text += f", {format_speed(entry)}" if pair else ""
        verdict = pair.verdict.value if pair else "reference"
        bars.append(HeadlineBar(entry.label, verdict, weight * own, span, text))
    many = f"for as many tokens as an iteration of {reference.label}"
    where = " · ".join(filter(None, (reference.run.model_or_size, reference.run.device)))
    title = f"Time {'of an iteration' if equal else many}{f', {where}' if where else ''}"
    axis = 1.02 * max(bar.interval[1] if bar.interval else bar.time for bar in bars)
    return BarGroup(title, tuple(bars[:MAX_ROWS]), max(0, len(bars) - MAX_ROWS), axis)
