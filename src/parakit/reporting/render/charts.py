"""Which charts a report has, the text of each, and what fills it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from parakit.artifacts.measurements import MemoryCategory
from parakit.formatting.units import GIB, MIB, number, size
from parakit.reporting.analyse.entry import Entry, loss_differences
from parakit.reporting.analyse.parity import loss_points
from parakit.reporting.analyse.report import Report
from parakit.reporting.canvas import (
    INK,
    WIDTH_INCHES,
    Chart,
    add_grid,
    chart_labels,
    draw_chart,
    entry_colour,
    evenly_spread_indexes,
    extreme_indexes,
)
from parakit.reporting.explain.bandwidth import draw_bandwidth, rate_curves
from parakit.reporting.explain.routing import draw_routing, merge_routing_of_ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_COHORTS = 4
MAX_CURVES = 8
MAX_DEVICES = 12
MAX_ROUTED = 4

MAX_TIMES = 40
_MAX_DOTS, _FEWEST_DOTS, _ALL_DOTS = 300, 50, 2000
MAX_RANKS = 8
_MAX_POINTS = 1000


def draw_charts(report: Report) -> list[Chart]:
    """Draw every chart that the runs have data for; the charts' texts name the limits."""
    entries = report.entries
    timed = [entry for entry in entries if entry.estimate]
    text = (
        "Each dot is an iteration that counts, an arrow one far beyond; the bar is the median with"
        " its 95% interval."
    )
    charts = _chart("iteration-time", "Iteration time", text, draw_times, timed, MAX_TIMES)
    charts += [*_bandwidth(entries), *_losses(entries), *_routing(entries)]
    measured = [entry for entry in entries if entry.memory_by_rank]
    text = "Peak memory of each rank, as the allocator or the ledger counts it."
    most = max((len(entry.memory_by_rank) for entry in measured), default=0)
    if most > MAX_RANKS:
        text += f" Of a row with more ranks the heaviest {MAX_RANKS}, of {most} at most."
    charts += _chart("memory", "Memory by rank", text, draw_memory, measured, MAX_TIMES)
    sampled = [e for e in entries if any(len(s.seconds) > 1 for s in e.run.samples.series)]
    text = "The devices' own readings during the newest run, once a second."
    return charts + _chart("devices", "Devices over time", text, draw_devices, sampled, MAX_DEVICES)


def _chart(
    name: str,
    title: str,
    text: str,
    painter: Callable[[Figure, Sequence[Entry]], None],
    entries: Sequence[Entry],
    limit: int,
) -> list[Chart]:
    """Of the first entries; nothing of none."""
    if not entries:
        return []
    text = _limited(text, entries, limit)
    return [draw_chart(name, title, text, lambda figure: painter(figure, entries[:limit]))]


def _bandwidth(entries: Sequence[Entry]) -> list[Chart]:
    text = (
        "Dots were measured between CPU ranks behind a link shaped to that rate (NET=), bars at the"
        " right edge without a limit. Dashed lines and rings are not measured: the formula of"
        " src/parakit/planner takes the fastest dot and changes only the time its bytes need on the link."
    )
    curves = rate_curves(entries)
    painter = partial(draw_bandwidth, curves=curves[:MAX_CURVES])
    return (
        [draw_chart("bandwidth", "Iteration time against bandwidth", text, painter)]
        if curves
        else []
    )


def _losses(entries: Sequence[Entry]) -> list[Chart]:
    cohorts: dict[str, list[Entry]] = {}
    for entry in entries:
        if len(loss_points(entry.run)[0]) > 1:
            cohorts.setdefault(entry.run.model, []).append(entry)
    charts = []
    for place, (model, members) in enumerate(list(cohorts.items())[:_MAX_COHORTS]):
        text = "Above the loss, below its difference from the reference in units of the last digit."
        if not loss_differences(members[:MAX_CURVES]):
            text = "Loss by iteration."
        title = f"Loss, {model}" if model and len(cohorts) > 1 else "Loss"
        charts += _chart(_numbered("loss", place), title, text, draw_losses, members, MAX_CURVES)
    return charts


def _routing(entries: Sequence[Entry]) -> list[Chart]:
    """A picture for each run that has routers; the first of a strategy stands for those like it."""
    text = (
        "How many tokens each expert computed, over its even share, layer by layer; below the"
        " router's losses before their coefficients, and its entropy."
    )
    watched = [(entry, entry.run.measurements.routing) for entry in entries]
    found = [(entry, record) for entry, record in watched if record]
    text = _limited(text, found, MAX_ROUTED)
    charts = []
    for place, (entry, record) in enumerate(found[:MAX_ROUTED]):
        painter = partial(draw_routing, iterations=merge_routing_of_ranks(record))
        charts.append(
            draw_chart(_numbered("routing", place), f"Routing, {entry.label}", text, painter)
        )
    return charts


def _numbered(name: str, place: int) -> str:
    return f"{name}-{place + 1}" if place else name


def _limited(text: str, drawn: Sequence[object], limit: int) -> str:
    if len(drawn) <= limit:
        return text
    return f"{text} Of {len(drawn)} the first {limit} are drawn; results.json has all."


def draw_times(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure. Samples far beyond the others stand as arrows at the edge."""
    figure.set_size_inches(WIDTH_INCHES, 0.8 + 0.44 * len(entries))
    axes = figure.add_subplot()
    drawn, reach = [], []
    for entry in entries:
        samples = [ms for run in entry.configuration.runs for ms in run.window.samples_ms]
        # Of many rows each has fewer: a dot takes as long to draw as to read a line.
        dots = min(_MAX_DOTS, max(_FEWEST_DOTS, _ALL_DOTS // len(entries)))
        samples = [samples[place] for place in evenly_spread_indexes(len(samples), dots)]
        # The axis goes as far as it must to show all but a twentieth of them.
        most = sorted(samples)[min(len(samples) - 1, int(0.95 * len(samples)))]
        reach.append(max(most, entry.interval[1] if entry.interval else 0))
        drawn.append(samples)
    edge = 1.05 * max(reach)
    for place, samples in enumerate(drawn):
        _draw_dots(axes, place, samples, edge)
    # All rows at once: an artist of matplotlib's for each takes as long as a hundred dots.
    rows, medians = range(len(entries)), [entry.time_ms or 0.0 for entry in entries]
    axes.vlines(medians, np.subtract(rows, 0.34), np.add(rows, 0.34), color=INK, linewidth=1.6)
    if ends := [(place, *e.interval) for place, e in enumerate(entries) if e.interval]:
        axes.hlines(*zip(*ends, strict=True), color=INK, linewidth=4.5, alpha=0.7)
    for place, median in zip(rows, medians, strict=True):
        axes.text(1.02, place, number(median), va="center", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(entries)), chart_labels(entries))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_xlim(0, edge)
    axes.set_xlabel("ms an iteration (right: median)")
    add_grid(axes, "x")


def draw_memory(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure: a bar for each rank, the heaviest eight of a configuration.

    Bars are split by category where every configuration has a ledger, else coloured by strategy.
    """
    axes = figure.add_subplot()
    largest = max(max(entry.memory_by_rank.values()) for entry in entries)
    unit, scale = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    split = all(entry.run.measurements.memory for entry in entries)
    ticks, height = [], 0.0
    for place, entry in enumerate(entries):
        peaks = entry.memory_by_rank
        ranks = sorted(sorted(peaks, key=peaks.__getitem__, reverse=True)[:MAX_RANKS])
        heights = [height + 0.8 * k for k in range(len(ranks))]
        for y, rank in zip(heights, ranks, strict=True):
            left = 0.0
            held = entry.run.measurements.memory_categories_by_rank[rank] if split else {}
            for hue, category in enumerate(MemoryCategory if split else ()):
                width = held.get(category.value, 0) / scale
                label = category.value.replace("_", " ")
                axes.barh(y, width, 0.7, left, color=entry_colour(hue), alpha=0.85, label=label)
                left += width
            if not split:
                axes.barh(y, peaks[rank] / scale, 0.7, color=entry_colour(place), alpha=0.8)
            text, tip = f"rank {rank}: {size(peaks[rank])}", (peaks[rank] / scale, y)
            look: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(text, tip, (5, 0), **look)
        ticks.append(sum(heights) / len(heights))
        height += 0.8 * len(ranks) + 0.5
    figure.set_size_inches(WIDTH_INCHES, (1.2 if split else 0.8) + 0.27 * height)
    axes.set_yticks(ticks, chart_labels(entries))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(height - 0.4, -0.7)
    axes.set_xlim(0, largest / scale * 1.25)
    axes.set_xlabel(unit)
    add_grid(axes, "x")
    if split:
        handles, texts = axes.get_legend_handles_labels()
        unique = dict(zip(texts, handles, strict=True))
        place_of: dict[str, Any] = {"loc": "outside upper left", "ncols": 4, "fontsize": 8}
        figure.legend(unique.values(), unique.keys(), **place_of)


def draw_losses(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure: losses above, differences below where a reference was compared with."""
    compared = loss_differences(entries)
    if not compared:
        _draw_curves(figure.add_subplot(), entries)
    else:
        figure.set_size_inches(WIDTH_INCHES, 4.6)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
        _draw_curves(upper, entries)
        upper.set_xlabel("")
        for lane, (place, _, steps, units) in enumerate(compared):
            kept = extreme_indexes(units, _MAX_POINTS)
            # A hair's breadth apart, because most differences are exactly 0.
            shift = 0.12 * (lane - (len(compared) - 1) / 2)
            look: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 3}
            xs, ys = [steps[at] + shift for at in kept], [units[at] for at in kept]
            lower.plot(xs, ys, color=entry_colour(place), **look)
        lower.axhline(0, color=INK, linewidth=0.8, alpha=0.6)
        low, high = lower.get_ylim()
        lower.set_ylim(min(low, -2.2), max(high, 2.2))
        lower.set_xlabel("iteration")
        lower.set_ylabel("difference\n(last digit)")
        add_grid(lower)
    if len(entries) > 1:
        figure.legend(loc="outside right upper", handlelength=2.4)


def _draw_curves(axes: Axes, entries: Sequence[Entry]) -> None:
    for place, (entry, label) in enumerate(zip(entries, chart_labels(entries), strict=True)):
        steps, losses = loss_points(entry.run)
        kept = extreme_indexes(losses, _MAX_POINTS)
        # Equal curves lie on one another: later ones are thinner and dashed, so that all show.
        axes.plot(
            steps[kept],
            losses[kept],
            color=entry_colour(place),
            linewidth=3.4 - 2.2 * place / max(1, len(entries) - 1),
            linestyle=(0, (4, place)) if place else "-",
            label=label,
        )
        for first in entry.run.restarts:
            axes.axvline(first - 0.5, color=entry_colour(place), linewidth=0.9, linestyle=":")
            look: dict[str, Any] = {"fontsize": "x-small", "verticalalignment": "top"}
            look["transform"] = axes.get_xaxis_transform()
            axes.text(first - 0.4, 0.98, "resumed", color=INK, **look)
    axes.set_xlabel("iteration")
    axes.set_ylabel("lm loss")
    add_grid(axes)


def draw_devices(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure: a row for each configuration, utilisation left, memory right."""
    figure.set_size_inches(WIDTH_INCHES, 0.5 + 1.15 * len(entries))
    grid_of_axes = figure.subplots(len(entries), 2, squeeze=False, sharey="col")
    for row, (entry, label) in enumerate(zip(entries, chart_labels(entries), strict=True)):
        left, right = grid_of_axes[row]
        for series in entry.run.samples.series[:MAX_RANKS]:
            readings = ((left, series.utilisation_percent, 1), (right, series.memory_bytes, GIB))
            for axes, values, scale in readings:
                read = zip(series.seconds, values, strict=True)
                points = [(second, value / scale) for second, value in read if value is not None]
                xs, ys = [x for x, _ in points], [y for _, y in points]
                hue, name = entry_colour(series.rank), f"rank {series.rank}"
                axes.plot(xs, ys, color=hue, linewidth=1.3, label=name)
        left.set_ylabel(label, rotation=0, ha="right", va="center")
        add_grid(left)
        add_grid(right)
    for axes in grid_of_axes[0]:
        # Only now: it ends the search for a range that holds every row.
        axes.set_ylim(bottom=0)
    cpu = all(entry.run.device == "cpu" for entry in entries)
    grid_of_axes[0][0].set_title("% of a core" if cpu else "% busy")
    grid_of_axes[0][1].set_title("resident memory, GiB" if cpu else "device memory, GiB")
    for axes in grid_of_axes[-1]:
        axes.set_xlabel("seconds")
    busiest = max(grid_of_axes, key=lambda row: len(row[0].lines))[0]
    if len(busiest.lines) > 1:
        figure.legend(handles=busiest.lines, loc="outside upper right", ncols=8, fontsize=8)


def _draw_dots(axes: Axes, place: int, samples: Sequence[float], edge: float) -> None:
    # Spread by the golden ratio: even, and the same in every drawing.
    heights = [place + 0.5 * ((k * 0.618034) % 1 - 0.5) for k in range(len(samples))]
    inside = [(x, y) for x, y in zip(samples, heights, strict=True) if x <= edge]
    beyond = [(edge, y) for x, y in zip(samples, heights, strict=True) if x > edge]
    for points, marker in ((inside, "o"), (beyond, ">")):
        if points:
            look: dict[str, Any] = {"linestyle": "none", "markersize": 3.74, "markeredgewidth": 0}
            # The layout, which takes half of the drawing's time, needs no dot: they are in the axes.
            look |= {"alpha": 0.45, "clip_on": False, "in_layout": False}
            axes.plot(*zip(*points, strict=True), marker=marker, color=entry_colour(place), **look)
