"""The DeepSpeed report's tables, from measurement: data parallelism, a pipeline, ZeRO's three stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.launch.experiment.measured import Measured, time_text
from tools.launch.experiment.tables import bullets, page
from tools.report.analyse.statistics import compare
from tools.spec.published import Figure, load_published
from tools.text.table import Column, Table, markdown_table
from tools.text.units import DASH, change, joined, megabytes, ms, percent, rounded, times

SOURCE = "002"
STANDS_IN = "gpt3-64m"
"""The published model whose figures are beside a model that was not published."""

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
    """One row: a run, its published figure, and what both are compared with."""

    run: Measured
    figure: Figure | None
    baseline: Measured | None
    published_baseline: Figure | None

    @property
    def name(self) -> str:
        return _name(self.run)


def render(model: str, runs: Sequence[Measured]) -> str:
    """Markdown: three tables, and what was measured."""
    shown, figures = _published(model)
    baseline = next((run for run in runs if run.strategy == _BASELINE), None)
    methods = tuple(
        _Method(run, figures.get(run.strategy), baseline, figures.get(_BASELINE)) for run in runs
    )
    other = "" if shown == model else f" The published figures are {shown}'s, not {model}'s."
    return page(
        "zero",
        model=model,
        other=other,
        performance=markdown_table(Table(_PERFORMANCE, methods)),
        verdicts=bullets(verdicts(runs)),
        shares=markdown_table(Table(_SHARES, methods)),
        traffic=markdown_table(Table(_TRAFFIC, methods)),
        measured=bullets(f"{method.name}: {method.run.implementation}" for method in methods),
    )


def verdicts(runs: Sequence[Measured]) -> list[str]:
    """The winner of each column, or those that are within noise of it, and which to use.

    Of methods within noise of the fastest the one with the least memory is to be used.
    """
    timed = [(run, found) for run in runs if (found := run.estimate)]
    held = [run for run in runs if run.peak_bytes]
    said = []
    if held:
        lightest = min(held, key=lambda run: run.peak_bytes or 0)
        said.append(f"Least memory: {_name(lightest)}, {megabytes(lightest.peak_bytes)}.")
    sending = [run for run in runs if run.sent_bytes]
    if sending:
        least = min(sending, key=lambda run: run.sent_bytes or 0)
        said.append(f"Least sent: {_name(least)}, {megabytes(least.sent_bytes)} an iteration.")
    if not timed:
        return said
    fastest, best = min(timed, key=lambda each: each[1].median)
    close = [run for run, found in timed if not compare(best, found).verdict.is_clear]
    others = [_name(run) for run in close if run is not fastest]
    beside = f"; within noise of it: {joined(others)}" if others else ", beyond the noise"
    said.append(f"Fastest: {_name(fastest)}{beside}.")
    known = [run for run in close if run.peak_bytes]
    used = min(known, key=lambda run: run.peak_bytes or 0, default=fastest)
    why = (
        f"of {_name(fastest)} and those within noise of it, it takes the least memory"
        if others
        else "nothing is within noise of it"
    )
    said.append(f"Use {_name(used)}: {why}.")
    return said


def ratio(value: float | None, reference: float | None) -> float | None:
    """None where either is missing."""
    return value / reference if value is not None and reference else None


def _published(model: str) -> tuple[str, Mapping[str, Figure]]:
    """The published model that is shown, and its figures by strategy."""
    figures = load_published().of(SOURCE)
    shown = model if any(figure.model == model for figure in figures) else STANDS_IN
    return shown, {figure.strategy: figure for figure in figures if figure.model == shown}


def _name(run: Measured) -> str:
    return _NAMES.get(run.strategy, run.strategy)


def _beside(measured: str, published: str | None) -> str:
    """`measured (published)`."""
    return f"{measured} ({published})" if published else measured


def _first(values: Sequence[float]) -> float | None:
    return values[0] if values else None


def _peak(method: _Method) -> str:
    peak = _first(method.figure.peak_memory_gb) if method.figure else None
    return _beside(megabytes(method.run.peak_bytes), f"{peak:g} GB" if peak else None)


def _time(method: _Method) -> str:
    time = _first(method.figure.iteration_ms) if method.figure else None
    return _beside(time_text(method.run.estimate), f"{time:g}" if time else None)


def _rate(method: _Method) -> str:
    rate = method.figure.samples_per_second if method.figure else None
    return _beside(rounded(method.run.samples_per_second), f"{rate:g}" if rate else None)


def _speedup(method: _Method) -> str:
    """Over the baseline; said to be within noise where the statistic says so."""
    published = method.figure.speedup if method.figure else None
    one = method.baseline.estimate if method.baseline else None
    two = method.run.estimate
    if one is None or two is None:
        return _beside(DASH, times(published) if published else None)
    found = compare(one, two)
    text = times(1 / found.ratio)
    if not found.verdict.is_clear and method.run is not method.baseline:
        text = f"{text}, {found.verdict}"
    return _beside(text, times(published) if published else None)


def _share(method: _Method, place: int, phase: str) -> str:
    measured = method.run.shares[place] if method.run.shares else None
    published = method.figure.shares.get(phase) if method.figure else None
    return _beside(percent(measured), None if published is None else percent(published))


def _saved(method: _Method) -> str:
    mine = ratio(method.run.peak_bytes, method.baseline.peak_bytes if method.baseline else None)
    theirs = ratio(
        _first(method.figure.peak_memory_gb) if method.figure else None,
        _first(method.published_baseline.peak_memory_gb) if method.published_baseline else None,
    )
    return _beside(change(mine), change(theirs) if theirs else None)


def _network(method: _Method, name: str, unit: str) -> str | None:
    found = method.figure.network.get(name) if method.figure else None
    return None if found is None else f"{found:g} {unit}"


def _waiting(method: _Method) -> str:
    seconds = method.run.communication_seconds
    text = DASH if seconds is None else f"{ms(seconds)} ms"
    return _beside(text, _network(method, "seconds", "s"))


def _bandwidth(method: _Method) -> str:
    rate = method.run.implied_gigabits
    text = DASH if rate is None else f"{rate:.2f} Gbit/s"
    return _beside(text, _network(method, "gbit_per_second", "Gbit/s"))


_METHOD: Column[_Method] = Column("Method", lambda method: method.name)
_PERFORMANCE: tuple[Column[_Method], ...] = (
    _METHOD,
    Column("Status", lambda method: method.run.status),
    Column("Parity", lambda method: method.run.parity),
    Column("Peak memory", _peak),
    Column("ms/iteration [95%]", _time),
    Column("Samples/s", _rate),
    Column("Speedup", _speedup),
)
_SHARES: tuple[Column[_Method], ...] = (
    _METHOD,
    Column("Forward", lambda method: _share(method, 0, "forward")),
    Column("Backward, with gradients", lambda method: _share(method, 1, "backward")),
    Column("Optimizer", lambda method: _share(method, 2, "optimizer")),
)
_TRAFFIC: tuple[Column[_Method], ...] = (
    _METHOD,
    Column("Memory against baseline", _saved),
    Column(
        "Sent/iteration",
        lambda method: _beside(megabytes(method.run.sent_bytes), _network(method, "sent_mb", "MB")),
    ),
    Column("With NCCL's rings", lambda method: megabytes(method.run.nccl_bytes)),
    Column("Waiting", _waiting),
    Column("Implied", _bandwidth),
)
