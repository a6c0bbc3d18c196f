"""Write the report's headline and the bars below it: which row is fastest, and by how much.

A group is a reference and the rows that are compared with it. The headline has a sentence per group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parakit.formatting.units import interval, joined, number, plural
from parakit.reporting.analyse.comparability import compare_speed
from parakit.reporting.analyse.earlier import UNDECIDED
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.report import Report
from parakit.reporting.analyse.statistics import (
    TimeVerdict,
    adjust_verdicts,
    describe_ratio,
    describe_speed,
)
from parakit.reporting.explain.costs import COST_DEFINITION
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
    """Return the main result of a report in a few sentences.

    If there is an earlier report, the sentences state the changes since that report. Otherwise they name the fastest
    row of each group of compared rows, or state the times if no rows can be compared. Without times they state the
    last losses. Without losses the result is the report's first sentence.

    Args:
        report: The report.
        paid: By run name, the largest cost of the run beyond its fair time (baseline's work divided over the run's
            ranks), and the part of the iteration that causes the cost. If empty, the text has no costs.
    """
    if report.baseline:
        return _describe_changes(report)
    timed = [entry for entry in report.entries if entry.estimate]
    if not timed:
        return _describe_losses(report) or write_sentences(report)[0]
    groups = [members for members in group_compared_rows(report) if len(members) > 1]
    if not groups:
        return _describe_uncompared(report, timed)
    texts = [_describe_fastest(members, paid) for members in groups[:_MAX_GROUPS]]
    if len(groups) > _MAX_GROUPS:
        texts.append(f"{len(groups) - _MAX_GROUPS} more groups are under 'Compared in speed'.")
    return " ".join(texts)


def _describe_losses(report: Report) -> str:
    """Return the last losses of logs that print losses and no times; empty if there is no such log."""
    losses = []
    for entry in report.entries:
        lines = entry.run.log.iterations
        has_times = lines.known("elapsed_ms").any()
        if entry.run.is_foreign and entry.final_loss is not None and not has_times:
            losses.append(
                f"{entry.label} ends with a loss of {entry.final_loss:.4g} in iteration {lines[-1].iteration}"
            )
    return f"{'; '.join(losses)}. No time of an iteration is printed." if losses else ""


def _describe_uncompared(report: Report, timed: Sequence[Entry]) -> str:
    """Return the times of rows that cannot be compared with one another, or the reason why they cannot."""
    if len(timed) == 1:
        entry = timed[0]
        rate = entry.rates.tokens_per_second
        rate_text = f", {number(rate)} tokens/s" if rate else ""
        return f"{entry.label} takes {number(entry.time_ms)} ms per iteration{rate_text}."
    withheld = withheld_sentences(report)
    if withheld:
        return " ".join(withheld)
    times = join_first_names([f"{number(entry.time_ms)} ms ({entry.label})" for entry in timed])
    return f"None of {len(timed)} rows can be compared with another. An iteration takes {times}."


def _describe_changes(report: Report) -> str:
    """Return which rows changed since an earlier report, and for which rows this is undecided."""
    changed = list(dict.fromkeys(change.row for change in report.changes if change.fails_strict))
    undecided = []
    for change in report.changes:
        if change.kind == UNDECIDED:
            # The end of the text says which difference the runs can show.
            _, _, visible_difference = change.text.rpartition(": ")
            undecided.append(f"{change.row} ({visible_difference})")
    if changed:
        rows = plural(len(changed), "row")
        text = f"Against {report.baseline}, {rows} changed: {join_first_names(changed)}."
    elif undecided:
        text = f"Nothing else changed against {report.baseline}."
    else:
        text = f"Nothing changed against {report.baseline}."
    if undecided:
        text += f" Undecided is {join_first_names(undecided)}; repeat the runs."
    return text


def _describe_fastest(members: Sequence[Entry], paid: Mapping[str, tuple[str, str]]) -> str:
    """Return sentences on the fastest row of a group, and on what slows the other rows down.

    The extra costs of the other rows are grouped by part of the iteration.

    Args:
        members: Rows of the group, the reference first.
        paid: The argument of `write_headline`.
    """
    compared = members[1:]
    best = min(compared, key=judged_ratio)
    verdicts = [entry.judged_time.verdict for entry in compared if entry.judged_time]
    text = (
        _describe_best(best, members)
        if TimeVerdict.FASTER in verdicts
        else _describe_none_faster(members)
    )
    payers_by_part: dict[str, list[str]] = {}
    for entry in compared:
        if entry.run.name in paid and entry is not best:
            cost, part = paid[entry.run.name]
            payers_by_part.setdefault(part, []).append(f"{entry.label} ({cost})")
    if not payers_by_part:
        return text
    parts = sorted(payers_by_part, key=lambda part: -len(payers_by_part[part]))
    costs = [
        f"The largest cost of {joined(payers_by_part[part][:MAX_NAMED])} is {part}."
        for part in parts[:_MAX_COSTS]
    ]
    return f"{text} {' '.join(costs)} {COST_DEFINITION}"


def _describe_best(best: Entry, members: Sequence[Entry]) -> str:
    """Return sentences with the fastest row of a group, its time, and the rows within noise of it."""
    text = (
        f"{best.label} is the fastest of {len(members)} rows{_per_device_text(members)}:"
        f" {number(best.time_ms)} ms per iteration, {_compare_with_reference(best, members[0])}."
    )
    near = _find_rows_within_noise(best, members)
    if near:
        text += f" {join_first_names(near)} {'is' if len(near) == 1 else 'are'} within noise of {best.label}."
    if best.speed and best.speed.model_doubt:
        doubt = best.speed.model_doubt
        text += f" {doubt[0].upper()}{doubt[1:]}."
    return text


def _find_rows_within_noise(best: Entry, members: Sequence[Entry]) -> list[str]:
    """Return the labels of the rows that are not shown to be slower than the fastest row."""
    compared_rows, comparisons = [], []
    for entry in members:
        if entry is best:
            continue
        comparison = compare_speed(best.configuration, entry.configuration).judged_time
        if comparison:  # None: one of the two rows has no time.
            compared_rows.append(entry)
            comparisons.append(comparison)
    return [
        entry.label
        for entry, comparison in zip(compared_rows, adjust_verdicts(comparisons), strict=True)
        if comparison.verdict is not TimeVerdict.SLOWER
    ]


def _describe_none_faster(members: Sequence[Entry]) -> str:
    """Return a sentence that no row is faster than the reference, with the number of rows per verdict.

    A single row is named with its verdict.
    """
    reference, compared = members[0], members[1:]
    outcomes = [entry.judged_time.outcome for entry in compared if entry.judged_time]
    counts = []
    for outcome, num_rows in sorted(Counter(outcomes).items()):
        preposition = "with " if outcome == TimeVerdict.UNKNOWN else ""
        counts.append(f"{num_rows} {preposition}{outcome}")
    result = joined(counts)
    if outcomes.count(TimeVerdict.NOISE) == len(compared):
        result = "all within noise"
    per_device = _per_device_text(members)
    than_reference = f"than {reference.label} ({number(reference.time_ms)} ms per iteration)"
    if outcomes == [TimeVerdict.SLOWER]:
        return f"{compared[0].label} is slower{per_device} {than_reference}."
    if len(outcomes) == 1:
        return f"{compared[0].label} is not shown to be faster{per_device} {than_reference}: {outcomes[0]}."
    return (
        f"None of the {len(compared)} other rows whose speed is compared is faster{per_device} "
        f"{than_reference}: {result}."
    )


def _per_device_text(members: Sequence[Entry]) -> str:
    """Return ` per device` if the rows of a group ran on different numbers of devices."""
    compares_devices = any(entry.speed and entry.speed.per_device_token for entry in members[1:])
    return " per device" if compares_devices else ""


def _compare_with_reference(entry: Entry, reference: Entry) -> str:
    """Return a phrase such as `35% less time per token than tp2`.

    If the numbers of devices differ, the phrase is about device time per token.
    """
    time_ratio = describe_ratio(token_ratio(entry))
    speed = entry.speed
    if speed is None or speed.per_device_token is None:
        speed_text = describe_speed(token_ratio(entry))
        text = f"{time_ratio} time per token than {reference.label}"
        return f"{text} ({speed_text})" if speed_text else text
    device_ratio = describe_ratio(speed.per_device_token.ratio)
    return f"{device_ratio} device time per token than {reference.label} ({time_ratio} time)"


def headline_and_sentences(headline: str, report: Report) -> list[str]:
    """Return the headline and then all verdicts, without repetition."""
    return list(dict.fromkeys((headline, *write_sentences(report))))


MAX_ROWS = 24
"""Bars per group; further rows are in the table only."""
MAX_GROUPS = 6


@dataclass(frozen=True)
class HeadlineBar:
    """Bar of one row. Times are milliseconds for as many tokens as one iteration of the reference has."""

    label: str
    verdict: str
    """`reference`, `faster`, `slower`, `within noise` or `too few samples`."""
    time: float
    interval: tuple[float, float] | None
    text: str


@dataclass(frozen=True)
class BarGroup:
    """Bars of rows that are compared with one another, on one axis."""

    title: str
    bars: tuple[HeadlineBar, ...]
    left_out: int
    """Number of rows beyond MAX_ROWS."""
    axis: float
    """Length of the axis in milliseconds."""


def build_bar_groups(report: Report) -> list[BarGroup]:
    """Return bars for each group of compared rows, the largest group first, at most MAX_GROUPS groups.

    If the report has a single group of one row, its bar is returned.
    """
    groups = group_compared_rows(report)
    compared = [members for members in groups if len(members) > 1]
    if not compared and len(groups) == 1:
        compared = groups
    return [_build_bar_group(members) for members in compared[:MAX_GROUPS]]


def _build_bar_group(members: Sequence[Entry]) -> BarGroup:
    """Return the bars of a group, with times scaled to the tokens of the reference's iteration."""
    reference = members[0]
    reference_ms = reference.time_ms or 0.0
    have_equal_work = True
    bars = []
    for entry in members:
        milliseconds = entry.time_ms or 0.0
        weight = token_ratio(entry) * reference_ms / milliseconds
        if abs(weight - 1) >= 1e-9:
            have_equal_work = False
        bars.append(_build_bar(entry, weight))
    title = "Time per iteration"
    if not have_equal_work:
        title = f"Time for as many tokens as an iteration of {reference.label}"
    where = " · ".join(filter(None, (reference.run.model_or_size, reference.run.device)))
    if where:
        title += f", {where}"
    longest = max(bar.interval[1] if bar.interval else bar.time for bar in bars)
    num_left_out = max(0, len(bars) - MAX_ROWS)
    return BarGroup(title, tuple(bars[:MAX_ROWS]), num_left_out, axis=1.02 * longest)


def _build_bar(entry: Entry, weight: float) -> HeadlineBar:
    """Return the bar of a row, with its time multiplied by `weight`."""
    milliseconds = weight * (entry.time_ms or 0.0)
    text = f"{number(milliseconds)} ms"
    scaled_interval = None
    if entry.interval:
        low, high = entry.interval
        scaled_interval = (weight * low, weight * high)
        text += f" [{interval(*scaled_interval)}]"
    verdict = "reference"
    if entry.judged_time:
        verdict = entry.judged_time.verdict.value
        text += f", {format_speed(entry)}"
    return HeadlineBar(entry.label, verdict, milliseconds, scaled_interval, text)
