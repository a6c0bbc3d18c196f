"""The DeepSpeed report's tables, from measurement: data parallelism, a pipeline, ZeRO's three stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """A row, its published figure, and what both are compared with."""

    row: Entry
    figure: Figure | None
    baseline: Entry | None
    published_baseline: Figure | None


def render(model: str, rows: Sequence[Entry]) -> str:
    """Markdown: three tables, and what was measured."""
    published = load_published().figures_of(SOURCE)
    figures = {figure.strategy: figure for figure in published if figure.model == model}
    models = joined(list(dict.fromkeys(figure.model for figure in published)))
    baseline = next((row for row in rows if row.strategy == _BASELINE), None)
    methods = tuple(
        _Method(row, figures.get(row.strategy), baseline, figures.get(_BASELINE)) for row in rows
    )
    return format_page(
        "zero",
        model=model,
        cells=format_sentence("zero", "beside" if figures else "alone", model=model, known=models),
        performance=markdown_table(Table(_PERFORMANCE, methods)),
        verdicts=format_bullets(describe_winners(rows)),
        shares=markdown_table(Table(_TIME_FRACTIONS, methods)),
        traffic=markdown_table(Table(_TRAFFIC, methods)),
        measured=format_bullets(f"{_get_method_name(row)}: {row.implementation}" for row in rows),
    )


def describe_winners(rows: Sequence[Entry]) -> list[str]:
    """The winner of each column, or those that are within noise of it, and which to use.

    Of methods within noise of the fastest the one with the least memory is to be used.
    """
    said = []
    for name, field in (("memory", "peak_bytes"), ("sent", "sent_bytes")):
        if known := {_get_method_name(row): size for row in rows if (size := getattr(row, field))}:
            method, size = min(known.items(), key=lambda each: each[1])
            said.append(format_sentence("zero", name, method=method, amount=megabytes(size)))
    timed = [(row, found) for row in rows if (found := row.estimate)]
    if not timed:
        return said
    fastest, best = min(timed, key=lambda each: each[1].median)
    close = [row for row, found in timed if not compare_times(best, found).verdict.is_clear]
    others = [_get_method_name(row) for row in close if row is not fastest]
    weighed = [row for row in close if row.peak_bytes]
    used = min(weighed, key=lambda row: row.peak_bytes or 0, default=fastest)
    parts = {
        "method": _get_method_name(fastest),
        "others": joined(others),
        "used": _get_method_name(used),
    }
    names = ("close", "use one of the close") if others else ("fastest", "use")
    return [*said, *(format_sentence("zero", name, **parts) for name in names)]


def divide_known(value: float | None, reference: float | None) -> float | None:
    """None where either is missing."""
    return value / reference if value is not None and reference else None


def format_milliseconds(seconds: float | None) -> str:
    """`157.8 ms`."""
    return DASH if seconds is None else f"{ms(seconds)} ms"


def _get_method_name(row: Entry) -> str:
    return _NAMES.get(row.strategy, row.strategy)


def _get_published_peak(figure: Figure | None) -> float | None:
    return figure.peak_memory_gb[0] if figure and figure.peak_memory_gb else None


def _format_speedup(method: _Method) -> str:
    """Over the baseline; said to be within noise where the statistic says so."""
    row, baseline = method.row, method.baseline
    one, two = baseline.estimate if baseline else None, row.estimate
    if one is None or two is None:
        return DASH
    found = compare_times(one, two)
    text = times(1 / found.ratio)
    return text if found.verdict.is_clear or row is baseline else f"{text}, {found.verdict}"


def _format_memory_change(method: _Method) -> str:
    baseline = method.baseline.peak_bytes if method.baseline else None
    mine = divide_known(method.row.peak_bytes, baseline)
    published = divide_known(
        _get_published_peak(method.figure), _get_published_peak(method.published_baseline)
    )
    return change(mine) + (f" ({change(published)})" if published else "")


def _make_published_column(
    name: str,
    measured: Callable[[_Method], str],
    published: Callable[[Figure], float | None],
    text: Callable[[float], str],
) -> Column[_Method]:
    """`measured (published)`."""

    def cell(method: _Method) -> str:
        found = published(method.figure) if method.figure else None
        return measured(method) + (f" ({text(found)})" if found is not None else "")

    return Column(name, cell)


def _make_fraction_column(name: str, place: int, phase: str) -> Column[_Method]:
    def measured(method: _Method) -> str:
        return percent(
            method.row.published_fractions[place] if method.row.published_fractions else None
        )

    return _make_published_column(name, measured, lambda figure: figure.shares.get(phase), percent)


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
