"""Which charts a report has, and the text of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tools.report.analyse.entry import Entry, memory_by_rank
from tools.report.analyse.parity import loss_points
from tools.report.analyse.report import Report
from tools.report.canvas import Chart, draw
from tools.report.explain.bandwidth import draw_bandwidth, rate_curves
from tools.report.explain.chart_routing import draw_routing
from tools.report.explain.routing import iterations_of
from tools.report.render.painters import (
    MAX_RANKS,
    MAX_TIMES,
    draw_devices,
    draw_losses,
    draw_memory,
    draw_times,
)

MAX_COHORTS = 4
MAX_CURVES = 8
MAX_DEVICES = 12
MAX_ROUTED = 4

__all__ = ["Chart", "draw_charts"]


def draw_charts(report: Report) -> list[Chart]:
    """Draw every chart that the runs have data for; the charts' texts name the limits."""
    charts = [*_times(report.entries), *_bandwidth(report.entries), *_losses(report.entries)]
    charts += _routing(report.entries)
    measured = [entry for entry in report.entries if memory_by_rank(entry.run)]
    if measured:
        text = "Peak memory of each rank, as the allocator or the ledger counts it."
        most = max(len(memory_by_rank(entry.run)) for entry in measured)
        if most > MAX_RANKS:
            text += f" Of a row with more ranks the heaviest {MAX_RANKS}, of {most} at most."
        painter = partial(draw_memory, entries=measured[:MAX_TIMES])
        charts.append(
            draw("memory", "Memory by rank", _limited(text, measured, MAX_TIMES), painter)
        )
    sampled = [e for e in report.entries if any(len(s.seconds) > 1 for s in e.run.samples.series)]
    if sampled:
        text = "The devices' own readings during the newest run, once a second."
        painter = partial(draw_devices, entries=sampled[:MAX_DEVICES])
        text = _limited(text, sampled, MAX_DEVICES)
        charts.append(draw("devices", "Devices over time", text, painter))
    return charts


def _times(entries: Sequence[Entry]) -> list[Chart]:
    timed = [entry for entry in entries if entry.estimate]
    if not timed:
        return []
    text = (
        "Each dot is an iteration that counts, an arrow one far beyond; the bar is the median with"
        " its 95% interval."
    )
    painter = partial(draw_times, entries=timed[:MAX_TIMES])
    return [draw("iteration-time", "Iteration time", _limited(text, timed, MAX_TIMES), painter)]


def _bandwidth(entries: Sequence[Entry]) -> list[Chart]:
    curves = rate_curves(entries)
    if not curves:
        return []
    text = (
        "Dots were measured between CPU ranks behind a link shaped to that rate (NET=), bars at the"
        " right edge without a limit. Dashed lines and rings are not measured: the formula of"
        " tools/plan takes the fastest dot and changes only the time its bytes need on the link."
    )
    painter = partial(draw_bandwidth, curves=curves[:MAX_CURVES])
    return [draw("bandwidth", "Iteration time against bandwidth", text, painter)]


def _losses(entries: Sequence[Entry]) -> list[Chart]:
    cohorts: dict[str, list[Entry]] = {}
    for entry in entries:
        if len(loss_points(entry.run)[0]) > 1:
            cohorts.setdefault(entry.run.model, []).append(entry)
    charts = []
    for place, (model, members) in enumerate(list(cohorts.items())[:MAX_COHORTS]):
        text = "Above the loss, below its difference from the reference in units of the last digit."
        if not any(entry.parity.compared for entry in members):
            text = "Loss by iteration."
        title = f"Loss, {model}" if model and len(cohorts) > 1 else "Loss"
        painter = partial(draw_losses, entries=members[:MAX_CURVES])
        name = "loss" if place == 0 else f"loss-{place + 1}"
        charts.append(draw(name, title, _limited(text, members, MAX_CURVES), painter))
    return charts


def _routing(entries: Sequence[Entry]) -> list[Chart]:
    """A picture for each run that has routers; the first of a strategy stands for those like it."""
    watched = [entry for entry in entries if entry.run.ledgers.routing]
    charts = []
    for place, entry in enumerate(watched[:MAX_ROUTED]):
        assert entry.run.ledgers.routing is not None
        text = (
            "How many tokens each expert computed, over its even share, layer by layer; below the"
            " router's losses before their coefficients, and its entropy."
        )
        painter = partial(draw_routing, iterations=iterations_of(entry.run.ledgers.routing))
        name = "routing" if place == 0 else f"routing-{place + 1}"
        title = f"Routing, {entry.label}"
        charts.append(draw(name, title, _limited(text, watched, MAX_ROUTED), painter))
    return charts


def _limited(text: str, entries: Sequence[Entry], limit: int) -> str:
    if len(entries) <= limit:
        return text
    return f"{text} Of {len(entries)} the first {limit} are drawn; results.json has all."
