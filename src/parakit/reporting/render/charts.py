"""Draw a report's charts as SVG files with matplotlib: times, bandwidth, losses, routing, memory, devices."""

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
    chart_label,
    chart_labels,
    draw_chart,
    entry_colour,
    evenly_spread_indexes,
)
from parakit.reporting.explain.bandwidth import draw_bandwidth, rate_curves
from parakit.reporting.explain.routing import draw_routing, merge_routing_of_ranks
from parakit.reporting.render.plots import Plot, build_loss_plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_MODELS = 4
"""Models for which a chart of losses is drawn."""
MAX_CURVES = 8
MAX_DEVICES = 12
MAX_ROUTED = 4
"""Rows whose routing is drawn."""

MAX_TIMES = 40
"""Rows of the charts of times and memory."""
_MAX_DOTS, _MIN_DOTS, _MAX_DOTS_OF_ALL_ROWS = 300, 50, 2000
MAX_RANKS = 8
_GOLDEN_RATIO = 0.618034
"""Steps of this size, modulo 1, spread dots evenly and in the same way in every drawing."""


def draw_charts(report: Report) -> list[Chart]:
    """Draw every chart for which the runs have data; a chart's text names the rows that it leaves out."""
    entries = report.entries
    timed = [entry for entry in entries if entry.estimate]
    text = (
        "Each dot is an iteration that counts, an arrow one far beyond the others. The bar is the median"
        " with its 95% interval."
    )
    charts = _chart("iteration-time", "Iteration time", text, draw_times, timed, MAX_TIMES)
    charts += [
        *_draw_bandwidth_chart(entries),
        *_draw_loss_charts(entries),
        *_draw_routing_charts(entries),
    ]
    measured = [entry for entry in entries if entry.memory_by_rank]
    text = "Peak memory per rank, as the allocator or memory.json counts it."
    max_ranks = max((len(entry.memory_by_rank) for entry in measured), default=0)
    if max_ranks > MAX_RANKS:
        text += (
            f" Rows have up to {max_ranks} ranks; the {MAX_RANKS} with the highest peaks are drawn."
        )
    charts += _chart("memory", "Memory by rank", text, draw_memory, measured, MAX_TIMES)
    sampled = [
        entry
        for entry in entries
        if any(len(series.seconds) > 1 for series in entry.run.samples.series)
    ]
    text = "Readings of the devices during the newest run, one per second."
    return charts + _chart("devices", "Devices over time", text, draw_devices, sampled, MAX_DEVICES)


def _chart(
    name: str,
    title: str,
    text: str,
    painter: Callable[[Figure, Sequence[Entry]], None],
    entries: Sequence[Entry],
    limit: int,
) -> list[Chart]:
    """Return a list with one chart, in which `painter` draws the first `limit` rows; empty without rows.

    If rows are left out, a sentence in the chart's text says so.
    """
    if not entries:
        return []
    text = _limited(text, entries, limit)
    return [draw_chart(name, title, text, lambda figure: painter(figure, entries[:limit]))]


def _draw_bandwidth_chart(entries: Sequence[Entry]) -> list[Chart]:
    text = (
        "Dots were measured between CPU ranks behind a link of that bandwidth (NET=), bars at the right"
        " edge without a limit. Dashed lines and rings are not measured: the planner's formula starts from"
        " the fastest dot and changes only the time that its bytes need on the link."
    )
    curves = rate_curves(entries)
    painter = partial(draw_bandwidth, curves=curves[:MAX_CURVES])
    return (
        [draw_chart("bandwidth", "Iteration time against bandwidth", text, painter)]
        if curves
        else []
    )


def _draw_loss_charts(entries: Sequence[Entry]) -> list[Chart]:
    entries_by_model: dict[str, list[Entry]] = {}
    for entry in entries:
        if len(loss_points(entry.run)[0]) > 1:
            entries_by_model.setdefault(entry.run.model, []).append(entry)
    charts = []
    for index, (model, members) in enumerate(list(entries_by_model.items())[:_MAX_MODELS]):
        text = (
            "Above: the loss. Below: its difference from the reference in units of the last digit."
        )
        if not loss_differences(members[:MAX_CURVES]):
            text = "Loss by iteration."
        title = f"Loss, {model}" if model and len(entries_by_model) > 1 else "Loss"
        charts += _chart(_numbered("loss", index), title, text, draw_losses, members, MAX_CURVES)
    return charts


def _draw_routing_charts(entries: Sequence[Entry]) -> list[Chart]:
    """Return a chart for each run with a `routing.json`, at most MAX_ROUTED charts."""
    text = (
        "Above: tokens of each expert over its even part, by layer. Below: the router's losses before"
        " their coefficients, and its entropy."
    )
    watched = [(entry, entry.run.measurements.routing) for entry in entries]
    watched_rows = [(entry, record) for entry, record in watched if record]
    text = _limited(text, watched_rows, MAX_ROUTED)
    charts = []
    for index, (entry, record) in enumerate(watched_rows[:MAX_ROUTED]):
        painter = partial(draw_routing, iterations=merge_routing_of_ranks(record))
        charts.append(
            draw_chart(_numbered("routing", index), f"Routing, {entry.label}", text, painter)
        )
    return charts


def _numbered(name: str, index: int) -> str:
    """Return a chart's name, with a number from the second chart of its kind on."""
    return f"{name}-{index + 1}" if index else name


def _limited(text: str, drawn: Sequence[object], limit: int) -> str:
    """Return a chart's text, with the number of rows that are not drawn."""
    if len(drawn) <= limit:
        return text
    return f"{text} The first {limit} of {len(drawn)} rows are drawn; results.json has all."


def draw_times(figure: Figure, entries: Sequence[Entry]) -> None:
    """Draw the iteration times of each row; samples far beyond the others are arrows at the edge."""
    figure.set_size_inches(WIDTH_INCHES, 0.8 + 0.44 * len(entries))
    axes = figure.add_subplot()
    drawn, reach = [], []
    for entry in entries:
        samples = [ms for run in entry.configuration.runs for ms in run.window.samples_ms]
        # With many rows each has fewer dots, because drawing a dot takes as long as reading a line.
        dots = min(_MAX_DOTS, max(_MIN_DOTS, _MAX_DOTS_OF_ALL_ROWS // len(entries)))
        samples = [samples[index] for index in evenly_spread_indexes(len(samples), dots)]
        # The axis is long enough for all but a twentieth of the samples.
        quantile = sorted(samples)[min(len(samples) - 1, int(0.95 * len(samples)))]
        reach.append(max(quantile, entry.interval[1] if entry.interval else 0))
        drawn.append(samples)
    edge = 1.05 * max(reach)
    for index, samples in enumerate(drawn):
        _draw_dots(axes, index, samples, edge)
    # All rows are drawn in one call, because an artist per row would take as long as a hundred dots.
    rows, medians = range(len(entries)), [entry.time_ms or 0.0 for entry in entries]
    axes.vlines(medians, np.subtract(rows, 0.34), np.add(rows, 0.34), color=INK, linewidth=1.6)
    if ends := [(index, *e.interval) for index, e in enumerate(entries) if e.interval]:
        axes.hlines(*zip(*ends, strict=True), color=INK, linewidth=4.5, alpha=0.7)
    for index, median in zip(rows, medians, strict=True):
        axes.text(1.02, index, number(median), va="center", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(entries)), chart_labels(entries))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_xlim(0, edge)
    axes.set_xlabel("ms per iteration (right: median)")
    add_grid(axes, "x")


def draw_memory(figure: Figure, entries: Sequence[Entry]) -> None:
    """Draw a bar per rank; of each row, the MAX_RANKS ranks with the highest peaks.

    The bars show memory categories if every row has a `memory.json`. Otherwise each row has one colour.
    """
    axes = figure.add_subplot()
    largest = max(max(entry.memory_by_rank.values()) for entry in entries)
    unit, scale = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    split = all(entry.run.measurements.memory for entry in entries)
    ticks, height = [], 0.0
    for index, entry in enumerate(entries):
        peaks = entry.memory_by_rank
        ranks = sorted(sorted(peaks, key=peaks.__getitem__, reverse=True)[:MAX_RANKS])
        heights = [height + 0.8 * k for k in range(len(ranks))]
        for y, rank in zip(heights, ranks, strict=True):
            bar_end = 0.0
            categories = entry.run.measurements.memory_categories_by_rank[rank] if split else {}
            for hue, category in enumerate(MemoryCategory if split else ()):
                width = categories.get(category.value, 0) / scale
                label = category.value.replace("_", " ")
                axes.barh(y, width, 0.7, bar_end, color=entry_colour(hue), alpha=0.85, label=label)
                bar_end += width
            if not split:
                axes.barh(y, peaks[rank] / scale, 0.7, color=entry_colour(index), alpha=0.8)
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
        legend_position: dict[str, Any] = {"loc": "outside upper left", "ncols": 4, "fontsize": 8}
        figure.legend(unique.values(), unique.keys(), **legend_position)


def draw_losses(figure: Figure, entries: Sequence[Entry]) -> None:
    """Draw the losses, and below them the differences from the reference if there are any."""
    losses, *differences = build_loss_plots(entries, merges=False)
    if not differences:
        _draw_curves(figure.add_subplot(), losses)
    else:
        figure.set_size_inches(WIDTH_INCHES, 4.6)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
        _draw_curves(upper, losses)
        upper.set_xlabel("")
        compared = differences[0].series
        for lane, series in enumerate(compared):
            # Most differences are exactly 0, so the rows are drawn a little beside one another.
            shift = 0.12 * (lane - (len(compared) - 1) / 2)
            look: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 3}
            xs = [iteration + shift for iteration in series.x]
            lower.plot(xs, series.y, color=entry_colour(series.colour), **look)
        lower.axhline(0, color=INK, linewidth=0.8, alpha=0.6)
        low, high = lower.get_ylim()
        lower.set_ylim(min(low, -2.2), max(high, 2.2))
        lower.set_xlabel("iteration")
        lower.set_ylabel("difference\n(last digit)")
        add_grid(lower)
    if len(entries) > 1:
        figure.legend(loc="outside right upper", handlelength=2.4)


def _draw_curves(axes: Axes, plot: Plot) -> None:
    """Draw the curves of a plot, and mark where a run was resumed."""
    for index, series in enumerate(plot.series):
        # Equal curves lie on one another, so later ones are thinner and dashed, and all can be seen.
        axes.plot(
            series.x,
            series.y,
            color=entry_colour(series.colour),
            linewidth=3.4 - 2.2 * index / max(1, len(plot.series) - 1),
            linestyle=(0, (4, index)) if index else "-",
            label=chart_label(series.label),
        )
    for mark in plot.marks:
        axes.axvline(mark.x - 0.5, color=INK, linewidth=0.9, linestyle=":")
        look: dict[str, Any] = {"fontsize": "x-small", "verticalalignment": "top"}
        look["transform"] = axes.get_xaxis_transform()
        axes.text(mark.x - 0.4, 0.98, "resumed", color=INK, **look)
    axes.set_xlabel("iteration")
    axes.set_ylabel(plot.unit)
    add_grid(axes)


def draw_devices(figure: Figure, entries: Sequence[Entry]) -> None:
    """Draw the samples of each row's devices: utilisation on the left, memory on the right."""
    figure.set_size_inches(WIDTH_INCHES, 0.5 + 1.15 * len(entries))
    grid_of_axes = figure.subplots(len(entries), 2, squeeze=False, sharey="col")
    for row, (entry, label) in enumerate(zip(entries, chart_labels(entries), strict=True)):
        utilisation_axes, memory_axes = grid_of_axes[row]
        for series in entry.run.samples.series[:MAX_RANKS]:
            readings = (
                (utilisation_axes, series.utilisation_percent, 1),
                (memory_axes, series.memory_bytes, GIB),
            )
            for axes, values, scale in readings:
                read = zip(series.seconds, values, strict=True)
                points = [(second, value / scale) for second, value in read if value is not None]
                xs, ys = [x for x, _ in points], [y for _, y in points]
                hue, name = entry_colour(series.rank), f"rank {series.rank}"
                axes.plot(xs, ys, color=hue, linewidth=1.3, label=name)
        utilisation_axes.set_ylabel(label, rotation=0, ha="right", va="center")
        add_grid(utilisation_axes)
        add_grid(memory_axes)
    for axes in grid_of_axes[0]:
        # This ends matplotlib's search for a range that holds every row, so it comes after all rows.
        axes.set_ylim(bottom=0)
    cpu = all(entry.run.device == "cpu" for entry in entries)
    grid_of_axes[0][0].set_title("% of a core" if cpu else "% busy")
    grid_of_axes[0][1].set_title("resident memory, GiB" if cpu else "device memory, GiB")
    for axes in grid_of_axes[-1]:
        axes.set_xlabel("seconds")
    busiest = max(grid_of_axes, key=lambda row: len(row[0].lines))[0]
    if len(busiest.lines) > 1:
        figure.legend(handles=busiest.lines, loc="outside upper right", ncols=8, fontsize=8)


def _draw_dots(axes: Axes, index: int, samples: Sequence[float], edge: float) -> None:
    """Draw the samples of the row at an index; samples beyond the edge become arrows there."""
    heights = [index + 0.5 * ((k * _GOLDEN_RATIO) % 1 - 0.5) for k in range(len(samples))]
    inside = [(x, y) for x, y in zip(samples, heights, strict=True) if x <= edge]
    beyond = [(edge, y) for x, y in zip(samples, heights, strict=True) if x > edge]
    for points, marker in ((inside, "o"), (beyond, ">")):
        if points:
            look: dict[str, Any] = {"linestyle": "none", "markersize": 3.74, "markeredgewidth": 0}
            # Dots lie within the axes, so the layout, which takes half of the time, can ignore them.
            look |= {"alpha": 0.45, "clip_on": False, "in_layout": False}
            axes.plot(*zip(*points, strict=True), marker=marker, color=entry_colour(index), **look)
