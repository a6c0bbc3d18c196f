"""Measure the tables of the DeepSpeed report: data parallelism, a pipeline, and ZeRO's three stages.

Most columns show the measured value, and the published one in brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from parakit.config.published import Figure, load_published
from parakit.experiments.engine import has_broken_losses, make_comparison
from parakit.experiments.tables import format_bullets, format_page, format_sentence
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.units import (
    DASH,
    change,
    joined,
    known,
    megabytes,
    ms,
    percent,
    rounded,
    times,
)
from parakit.reporting import Entry, compare_times, format_time

SOURCE = "002"

_NAMES = {
    "dp2": "Baseline",
    "pp2": "Pipeline",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
_BASELINE = "dp2"


@dataclass(frozen=True)
class _Method:
    """A method and the baseline, each with its measured row and its published figure."""

    row: Entry
    """Measured row of the method."""
    figure: Figure | None
    """Published figure of the method; None if none was published for this model."""
    baseline: Entry | None
    """Measured row of the baseline; None if the baseline has not run."""
    published_baseline: Figure | None
    """Published figure of the baseline; None if none was published for this model."""


def render(model: str, rows: Sequence[Entry]) -> str:
    """Return the page in Markdown: tables of performance, time fractions and traffic, with verdicts."""
    published = load_published().figures_of(SOURCE)
    published_models = joined(list(dict.fromkeys(figure.model for figure in published)))
    figures = {figure.strategy: figure for figure in published if figure.model == model}
    baseline = None
    for row in rows:
        if row.strategy == _BASELINE:
            baseline = row
            break
    methods = []
    for row in rows:
        figure = figures.get(row.strategy)
        methods.append(_Method(row, figure, baseline, figures.get(_BASELINE)))
    cells_sentence = "beside" if figures else "alone"
    return format_page(
        "zero",
        model=model,
        cells=format_sentence("zero", cells_sentence, model=model, known=published_models),
        performance=markdown_table(Table(_PERFORMANCE, tuple(methods))),
        verdicts=format_bullets(describe_winners(rows)),
        shares=markdown_table(Table(_TIME_FRACTIONS, tuple(methods))),
        traffic=markdown_table(Table(_TRAFFIC, tuple(methods))),
        measured=format_bullets(f"{_get_method_name(row)}: {row.implementation}" for row in rows),
    )


def describe_winners(rows: Sequence[Entry]) -> list[str]:
    """Return sentences on the method with the least memory, least traffic and least time, and which to use.

    Among methods within noise of the fastest, the one with the least memory is to be used. Values that no row has
    give no sentence.
    """
    sentences = []
    for name, field in (("memory", "peak_bytes"), ("sent", "sent_bytes")):
        measured = [row for row in rows if getattr(row, field)]
        if measured:
            least = min(measured, key=attrgetter(field))
            amount = megabytes(getattr(least, field))
            method = _get_method_name(least)
            sentences.append(format_sentence("zero", name, method=method, amount=amount))
    return [*sentences, *_describe_fastest(rows)]


def _describe_fastest(rows: Sequence[Entry]) -> list[str]:
    """Return a sentence on the fastest method and one on the method to use; empty if no row has a time."""
    timed = [(row, row.estimate) for row in rows if row.estimate]
    if not timed:
        return []
    fastest, fastest_estimate = min(timed, key=lambda pair: pair[1].median)
    within_noise = []
    for row, estimate in timed:
        if not compare_times(fastest_estimate, estimate).verdict.is_clear:
            within_noise.append(row)
    with_memory = [row for row in within_noise if row.peak_bytes]
    to_use = min(with_memory, key=lambda row: row.peak_bytes or 0, default=fastest)
    rivals = [_get_method_name(row) for row in within_noise if row is not fastest]
    sentence_names = ("close", "use one of the close") if rivals else ("fastest", "use")
    sentences = []
    for name in sentence_names:
        sentence = format_sentence(
            "zero",
            name,
            method=_get_method_name(fastest),
            others=joined(rivals),
            used=_get_method_name(to_use),
        )
        sentences.append(sentence)
    return sentences


def divide_known(value: float | None, reference: float | None) -> float | None:
    """Return the ratio of two values; None if one is missing or the reference is 0."""
    return value / reference if value is not None and reference else None


def format_milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds, such as `157.8 ms`; a dash for None."""
    return DASH if seconds is None else f"{ms(seconds)} ms"


def _get_method_name(row: Entry) -> str:
    """Return the report's name of a row's method; the strategy if the report does not have it."""
    return _NAMES.get(row.strategy, row.strategy)


def _get_published_peak(figure: Figure | None) -> float | None:
    """Return the published peak memory in GB; None if none was published."""
    return figure.peak_memory_gb[0] if figure and figure.peak_memory_gb else None


def _format_speedup(method: _Method) -> str:
    """Return the speed over the baseline's, such as `1.20×`, and whether that is within noise."""
    row, baseline = method.row, method.baseline
    if baseline is None or baseline.estimate is None or row.estimate is None:
        return DASH
    comparison = compare_times(baseline.estimate, row.estimate)
    text = times(1 / comparison.ratio)
    if comparison.verdict.is_clear or row is baseline:
        return text
    return f"{text}, {comparison.verdict}"


def _format_memory_change(method: _Method) -> str:
    """Return the change of peak memory against the baseline, with the published change in brackets."""
    baseline_bytes = method.baseline.peak_bytes if method.baseline else None
    text = change(divide_known(method.row.peak_bytes, baseline_bytes))
    published_ratio = divide_known(
        _get_published_peak(method.figure), _get_published_peak(method.published_baseline)
    )
    if published_ratio:
        text += f" ({change(published_ratio)})"
    return text


def _make_published_column(
    name: str,
    format_measured: Callable[[_Method], str],
    get_published: Callable[[Figure], float | None],
    format_published: Callable[[float], str],
) -> Column[_Method]:
    """Return a column `measured (published)`; without a published value the brackets are left out."""

    def format_cell(method: _Method) -> str:
        published = get_published(method.figure) if method.figure else None
        brackets = f" ({format_published(published)})" if published is not None else ""
        return format_measured(method) + brackets

    return Column(name, format_cell)


def _make_fraction_column(name: str, index: int, phase: str) -> Column[_Method]:
    """Return the column of a phase's fraction of the iteration.

    Args:
        name: Heading.
        index: Position of the phase among a row's fractions.
        phase: Key of the phase in the published figures.
    """

    def format_measured(method: _Method) -> str:
        fractions = method.row.published_fractions
        return percent(fractions[index] if fractions else None)

    return _make_published_column(
        name, format_measured, lambda figure: figure.shares.get(phase), percent
    )


_METHOD = Column[_Method]("Method", lambda method: _get_method_name(method.row))
_PERFORMANCE = (
    _METHOD,
    Column[_Method]("Status", lambda method: method.row.status),
    Column[_Method]("Parity", lambda method: method.row.parity.verdict),
    _make_published_column(
        "Peak memory",
        lambda method: megabytes(method.row.peak_bytes),
        _get_published_peak,
        known("{:g} GB"),
    ),
    _make_published_column(
        "ms/iteration [95%]",
        lambda method: format_time(method.row.estimate),
        lambda figure: next(iter(figure.iteration_ms), None),
        known("{:g}"),
    ),
    _make_published_column(
        "Samples/s",
        lambda method: rounded(method.row.samples_per_second),
        lambda figure: figure.samples_per_second,
        known("{:g}"),
    ),
    _make_published_column("Speedup", _format_speedup, lambda figure: figure.speedup, times),
)
_TIME_FRACTIONS = (
    _METHOD,
    _make_fraction_column("Forward", 0, "forward"),
    _make_fraction_column("Backward, with gradients", 1, "backward"),
    _make_fraction_column("Optimizer", 2, "optimizer"),
)
_TRAFFIC = (
    _METHOD,
    Column[_Method]("Memory against baseline", _format_memory_change),
    _make_published_column(
        "Sent/iteration",
        lambda method: megabytes(method.row.sent_bytes),
        lambda figure: figure.network.get("sent_mb"),
        known("{:g} MB"),
    ),
    Column[_Method]("With NCCL's rings", lambda method: method.row.nccl_bytes, megabytes),
    _make_published_column(
        "Waiting",
        lambda method: format_milliseconds(method.row.communication_seconds),
        lambda figure: figure.network.get("seconds"),
        known("{:g} s"),
    ),
    _make_published_column(
        "Implied",
        lambda method: known("{:.2f} Gbit/s")(method.row.implied_gigabits),
        lambda figure: figure.network.get("gbit_per_second"),
        known("{:g} Gbit/s"),
    ),
)
OUTPUT = make_comparison(lambda study: render(study.model, study.rows), has_broken_losses)
