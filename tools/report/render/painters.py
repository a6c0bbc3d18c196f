"""What fills a chart: iteration times, peak memory by rank, loss curves, device samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tools.records.measurements import MemoryCategory
from tools.report.analyse.entry import Entry, loss_differences, memory_by_rank
from tools.report.analyse.parity import loss_points
from tools.report.canvas import INK, WIDTH_INCHES, colour, grid, names
from tools.report.read.runs import Run
from tools.report.read.sources import DeviceSeries
from tools.report.render.thinning import evenly, extremes
from tools.text.units import GIB, MIB, number, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TIMES = 40
_MAX_DOTS = 300
MAX_RANKS = 8
_MAX_POINTS = 1000


def draw_times(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure. Samples far beyond the others stand as arrows at the edge."""
    figure.set_size_inches(WIDTH_INCHES, 0.8 + 0.44 * len(entries))
    axes = figure.add_subplot()
    edge = 1.05 * max(_reach(entry) for entry in entries)
    for place, entry in enumerate(entries):
        _draw_row(axes, place, entry, edge)
    axes.set_yticks(range(len(entries)), names(entries))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_xlim(0, edge)
    axes.set_xlabel("ms an iteration (right: median)")
    grid(axes, "x")


def draw_memory(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure: a bar for each rank, the heaviest eight of a configuration.

    Bars are split by category where every configuration has a ledger, else coloured by strategy.
    """
    axes = figure.add_subplot()
    largest = max(max(memory_by_rank(entry.run).values()) for entry in entries)
    unit, scale = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    split = all(entry.run.ledgers.memory for entry in entries)
    ticks, height = [], 0.0
    for place, entry in enumerate(entries):
        ranks = _heaviest(entry)
        heights = [height + 0.8 * k for k in range(len(ranks))]
        for y, rank in zip(heights, ranks, strict=True):
            parts = entry.run.ledgers.memory_categories_by_rank[rank] if split else None
            _draw_bar(axes, y, scale, parts, (colour(place), memory_by_rank(entry.run)[rank]))
            _label(axes, y, scale, rank, memory_by_rank(entry.run)[rank])
        ticks.append(sum(heights) / len(heights))
        height += 0.8 * len(ranks) + 0.5
    figure.set_size_inches(WIDTH_INCHES, (1.2 if split else 0.8) + 0.27 * height)
    axes.set_yticks(ticks, names(entries))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(height - 0.4, -0.7)
    axes.set_xlim(0, largest / scale * 1.25)
    axes.set_xlabel(unit)
    grid(axes, "x")
    if split:
        _legend(figure, axes)


def draw_losses(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure: losses above, differences below where a reference was compared with."""
    labels = names(entries)
    compared = loss_differences(entries)
    if not compared:
        _draw_curves(figure.add_subplot(), entries, labels)
    else:
        figure.set_size_inches(WIDTH_INCHES, 4.6)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
        _draw_curves(upper, entries, labels)
        upper.set_xlabel("")
        _draw_differences(lower, compared)
    if len(entries) > 1:
        figure.legend(loc="outside right upper", handlelength=2.4)


def draw_devices(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure: a row for each configuration, utilisation left, memory right."""
    figure.set_size_inches(WIDTH_INCHES, 0.5 + 1.15 * len(entries))
    grid_of_axes = figure.subplots(len(entries), 2, squeeze=False, sharey="col")
    for row, (entry, label) in enumerate(zip(entries, names(entries), strict=True)):
        left, right = grid_of_axes[row]
        for series in entry.run.samples.series[:MAX_RANKS]:
            _draw_series(left, series, series.utilisation_percent, 1)
            _draw_series(right, series, series.memory_bytes, GIB)
        left.set_ylabel(label, rotation=0, ha="right", va="center")
        grid(left)
        grid(right)
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


def _samples(entry: Entry) -> list[float]:
    samples = [ms for run in entry.configuration.runs for ms in run.window.samples_ms]
    return [samples[place] for place in evenly(len(samples), _MAX_DOTS)]


def _reach(entry: Entry) -> float:
    """How far the axis must go to show all but a twentieth of the samples."""
    ordered = sorted(_samples(entry))
    found = entry.configuration.estimate
    most = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return max(most, (found.high or 0) if found else 0)


def _draw_row(axes: Axes, place: int, entry: Entry, edge: float) -> None:
    samples = _samples(entry)
    # Spread by the golden ratio: even, and the same in every drawing.
    heights = [place + 0.5 * ((k * 0.618034) % 1 - 0.5) for k in range(len(samples))]
    inside = [(x, y) for x, y in zip(samples, heights, strict=True) if x <= edge]
    beyond = [(edge, y) for x, y in zip(samples, heights, strict=True) if x > edge]
    for points, marker in ((inside, "o"), (beyond, ">")):
        if points:
            xs, ys = zip(*points, strict=True)
            axes.scatter(
                xs, ys, s=14, marker=marker, color=colour(place), alpha=0.45, linewidths=0,
                clip_on=False,
            )  # fmt: skip
    found = entry.configuration.estimate
    if found is None:
        return
    axes.vlines(found.median, place - 0.34, place + 0.34, color=INK, linewidth=1.6)
    if found.low is not None and found.high is not None:
        axes.hlines(place, found.low, found.high, color=INK, linewidth=4.5, alpha=0.7)
    axes.annotate(
        number(found.median),
        (1.02, place),
        xycoords=("axes fraction", "data"),
        va="center",
        annotation_clip=False,
    )


def _heaviest(entry: Entry) -> list[int]:
    peaks = memory_by_rank(entry.run)
    return sorted(sorted(peaks, key=lambda rank: -peaks[rank])[:MAX_RANKS])


def _draw_bar(
    axes: Axes, y: float, scale: float, parts: Mapping[str, int] | None, whole: tuple[str, int]
) -> None:
    if parts is None:
        axes.barh(y, whole[1] / scale, 0.7, color=whole[0], alpha=0.8)
        return
    left = 0.0
    for place, category in enumerate(MemoryCategory):
        width = parts.get(category.value, 0) / scale
        label = category.value.replace("_", " ")
        axes.barh(y, width, 0.7, left, color=colour(place), alpha=0.85, label=label)
        left += width


def _label(axes: Axes, y: float, scale: float, rank: int, peak: int) -> None:
    text = f"rank {rank}: {size(peak)}"
    place = (peak / scale, y)
    axes.annotate(text, place, (5, 0), textcoords="offset points", va="center", fontsize=8)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, texts = axes.get_legend_handles_labels()
    unique = dict(zip(texts, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside upper left", ncols=4, fontsize=8)


def _draw_curves(axes: Axes, entries: Sequence[Entry], labels: Sequence[str]) -> None:
    for place, entry in enumerate(entries):
        steps, losses = loss_points(entry.run)
        kept = extremes(losses, _MAX_POINTS)
        # Equal curves lie on one another: later ones are thinner and dashed, so that all show.
        axes.plot(
            steps[kept],
            losses[kept],
            color=colour(place),
            linewidth=3.4 - 2.2 * place / max(1, len(entries) - 1),
            linestyle=(0, (4, place)) if place else "-",
            label=labels[place],
        )
        _mark_restarts(axes, entry.run.restarts, colour(place))
    axes.set_xlabel("iteration")
    axes.set_ylabel("lm loss")
    grid(axes)


def _mark_restarts(axes: Axes, restarts: Sequence[int], hue: str) -> None:
    for first in restarts:
        axes.axvline(first - 0.5, color=hue, linewidth=0.9, linestyle=":")
        axes.text(
            first - 0.4,
            0.98,
            "resumed",
            color=INK,
            fontsize="x-small",
            verticalalignment="top",
            transform=axes.get_xaxis_transform(),
        )


def _draw_differences(
    axes: Axes, compared: Sequence[tuple[int, Run, list[int], list[float]]]
) -> None:
    for lane, (place, _, steps, units) in enumerate(compared):
        kept = extremes(units, _MAX_POINTS)
        # A hair's breadth apart, because most differences are exactly 0.
        shift = 0.12 * (lane - (len(compared) - 1) / 2)
        axes.plot(
            [steps[at] + shift for at in kept],
            [units[at] for at in kept],
            color=colour(place),
            linestyle="none",
            marker="o",
            markersize=3,
        )
    axes.axhline(0, color=INK, linewidth=0.8, alpha=0.6)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -2.2), max(high, 2.2))
    axes.set_xlabel("iteration")
    axes.set_ylabel("difference\n(last digit)")
    grid(axes)


def _draw_series(
    axes: Axes, series: DeviceSeries, values: Sequence[float | None], scale: float
) -> None:
    points = [
        (second, value / scale)
        for second, value in zip(series.seconds, values, strict=True)
        if value is not None
    ]
    axes.plot(
        [second for second, _ in points],
        [value for _, value in points],
        color=colour(series.rank),
        linewidth=1.3,
        label=f"rank {series.rank}",
    )
