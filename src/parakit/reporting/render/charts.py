"""Draw a report's charts as SVG files with matplotlib: times, bandwidth, losses, routing, memory, devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
_RANK_DISTANCE = 0.8
"""Distance between the bars of two ranks of one row, of which the bars take 0.7."""
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
    """Draw the iteration times of each row. Samples far beyond the others are arrows at the edge."""
    figure.set_size_inches(WIDTH_INCHES, 0.8 + 0.44 * len(entries))
    axes = figure.add_subplot()
    # With many rows each has fewer dots, because drawing a dot takes as long as reading a line.
    max_dots = min(_MAX_DOTS, max(_MIN_DOTS, _MAX_DOTS_OF_ALL_ROWS // len(entries)))
    samples_by_row = [_select_samples(entry, max_dots) for entry in entries]
    reaches = [
        _needed_length(entry, samples)
        for entry, samples in zip(entries, samples_by_row, strict=True)
    ]
    edge = 1.05 * max(reaches)
    for row, samples in enumerate(samples_by_row):
        _draw_dots(axes, row, samples, edge)
    # All rows are drawn in one call, because an artist per row would take as long as a hundred dots.
    rows, medians = range(len(entries)), [entry.time_ms or 0.0 for entry in entries]
    axes.vlines(medians, np.subtract(rows, 0.34), np.add(rows, 0.34), color=INK, linewidth=1.6)
    intervals = [(row, *entry.interval) for row, entry in enumerate(entries) if entry.interval]
    if intervals:
        rows_with_interval, lows, highs = zip(*intervals, strict=True)
        axes.hlines(rows_with_interval, lows, highs, color=INK, linewidth=4.5, alpha=0.7)
    for row, median in zip(rows, medians, strict=True):
        axes.text(1.02, row, number(median), va="center", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(entries)), chart_labels(entries))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_xlim(0, edge)
    axes.set_xlabel("ms per iteration (right: median)")
    add_grid(axes, "x")


def _needed_length(entry: Entry, samples: Sequence[float]) -> float:
    """Return the milliseconds that the axis needs for a row: its interval, and all but a twentieth of its samples."""
    index = min(len(samples) - 1, int(0.95 * len(samples)))
    quantile = sorted(samples)[index]
    if entry.interval is None:
        return quantile
    _, high = entry.interval
    return max(quantile, high)


def _select_samples(entry: Entry, max_samples: int) -> list[float]:
    """Return the samples of all runs of a row in milliseconds, or `max_samples` of them at even distances."""
    samples: list[float] = []
    for run in entry.configuration.runs:
        samples += run.window.samples_ms
    return [samples[index] for index in evenly_spread_indexes(len(samples), max_samples)]


def draw_memory(figure: Figure, entries: Sequence[Entry]) -> None:
    """Draw a bar per rank; of each row, the MAX_RANKS ranks with the highest peaks.

    The bars show memory categories if every row has a `memory.json`. Otherwise each row has one colour.
    """
    axes = figure.add_subplot()
    largest = max(max(entry.memory_by_rank.values()) for entry in entries)
    unit, scale = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    shows_categories = all(entry.run.measurements.memory for entry in entries)
    ticks, height = [], 0.0
    for index, entry in enumerate(entries):
        ranks = _select_ranks(entry)
        bar_heights = [height + _RANK_DISTANCE * position for position in range(len(ranks))]
        for y, rank in zip(bar_heights, ranks, strict=True):
            peak_bytes = entry.memory_by_rank[rank]
            width = peak_bytes / scale
            if shows_categories:
                categories = entry.run.measurements.memory_categories_by_rank[rank]
                _draw_categories(axes, y, categories, scale)
            else:
                axes.barh(y, width, 0.7, color=entry_colour(index), alpha=0.8)
            look: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(f"rank {rank}: {size(peak_bytes)}", (width, y), (5, 0), **look)
        ticks.append(sum(bar_heights) / len(bar_heights))
        height += _RANK_DISTANCE * len(ranks) + 0.5
    figure.set_size_inches(WIDTH_INCHES, (1.2 if shows_categories else 0.8) + 0.27 * height)
    axes.set_yticks(ticks, chart_labels(entries))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(height - 0.4, -0.7)
    axes.set_xlim(0, largest / scale * 1.25)
    axes.set_xlabel(unit)
    add_grid(axes, "x")
    if shows_categories:
        # Every bar adds its categories to the legend, so each text is kept once.
        handles, texts = axes.get_legend_handles_labels()
        handle_by_text = dict(zip(texts, handles, strict=True))
        legend_look: dict[str, Any] = {"loc": "outside upper left", "ncols": 4, "fontsize": 8}
        figure.legend(handle_by_text.values(), handle_by_text.keys(), **legend_look)


def _select_ranks(entry: Entry) -> list[int]:
    """Return the MAX_RANKS ranks of a row with the highest peaks, in the order of their numbers."""
    peaks = entry.memory_by_rank
    highest_first = sorted(peaks, key=lambda rank: peaks[rank], reverse=True)
    return sorted(highest_first[:MAX_RANKS])


def _draw_categories(axes: Axes, y: float, categories: Mapping[str, int], scale: int) -> None:
    """Draw the memory categories of one rank as parts of one bar.

    Args:
        axes: Axes to draw in.
        y: Height of the bar's middle.
        categories: Bytes by category; a missing category has none.
        scale: Bytes per unit of the axis.
    """
    bar_end = 0.0
    for hue, category in enumerate(MemoryCategory):
        width = categories.get(category.value, 0) / scale
        label = category.value.replace("_", " ")
        axes.barh(y, width, 0.7, bar_end, color=entry_colour(hue), alpha=0.85, label=label)
        bar_end += width


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
    utilisation_column, memory_column = grid_of_axes[:, 0], grid_of_axes[:, 1]
    for row, (entry, label) in enumerate(zip(entries, chart_labels(entries), strict=True)):
        for series in entry.run.samples.series[:MAX_RANKS]:
            rank, seconds = series.rank, series.seconds
            utilisation, memory = series.utilisation_percent, series.memory_bytes
            _draw_samples(utilisation_column[row], rank, seconds, utilisation, scale=1)
            _draw_samples(memory_column[row], rank, seconds, memory, scale=GIB)
        utilisation_column[row].set_ylabel(label, rotation=0, ha="right", va="center")
        add_grid(utilisation_column[row])
        add_grid(memory_column[row])
    for axes in grid_of_axes[0]:
        # This ends matplotlib's search for a range that holds every row, so it comes after all rows.
        axes.set_ylim(bottom=0)
    are_on_cpu = all(entry.run.device == "cpu" for entry in entries)
    utilisation_column[0].set_title("% of a core" if are_on_cpu else "% busy")
    memory_column[0].set_title("resident memory, GiB" if are_on_cpu else "device memory, GiB")
    for axes in grid_of_axes[-1]:
        axes.set_xlabel("seconds")
    axes_with_most_ranks = max(utilisation_column, key=lambda axes: len(axes.lines))
    if len(axes_with_most_ranks.lines) > 1:
        handles = axes_with_most_ranks.lines
        figure.legend(handles=handles, loc="outside upper right", ncols=8, fontsize=8)


def _draw_samples(
    axes: Axes,
    rank: int,
    seconds: Sequence[float],
    values: Sequence[float | None],
    *,
    scale: int,
) -> None:
    """Draw one rank's samples over time; samples without a value are left out.

    Args:
        axes: Axes to draw in.
        rank: The rank, which the legend names.
        seconds: Time of each sample.
        values: Value of each sample.
        scale: Number by which the values are divided.
    """
    xs, ys = [], []
    for second, value in zip(seconds, values, strict=True):
        if value is not None:
            xs.append(second)
            ys.append(value / scale)
    axes.plot(xs, ys, color=entry_colour(rank), linewidth=1.3, label=f"rank {rank}")


def _draw_dots(axes: Axes, index: int, samples: Sequence[float], edge: float) -> None:
    """Draw the samples of the row at an index; samples beyond the edge become arrows there."""
    inside: list[tuple[float, float]] = []
    beyond: list[tuple[float, float]] = []
    for position, sample in enumerate(samples):
        # Multiples of the golden ratio spread neighbouring samples over the height of the row.
        height = index + 0.5 * ((position * _GOLDEN_RATIO) % 1 - 0.5)
        if sample <= edge:
            inside.append((sample, height))
        else:
            beyond.append((edge, height))
    look: dict[str, Any] = {"linestyle": "none", "markersize": 3.74, "markeredgewidth": 0}
    # Dots lie within the axes, so the layout, which takes half of the time, can ignore them.
    look |= {"alpha": 0.45, "clip_on": False, "in_layout": False}
    for points, marker in ((inside, "o"), (beyond, ">")):
        if points:
            times, heights = zip(*points, strict=True)
            axes.plot(times, heights, marker=marker, color=entry_colour(index), **look)
