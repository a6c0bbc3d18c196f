"""Charts with a row for each configuration: iteration times, and peak memory by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tools.records.measurements import MemoryCategory
from tools.report.analyse.entry import Entry, memory_by_rank
from tools.report.canvas import INK, WIDTH_INCHES, colour, grid, names
from tools.text.units import number, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TIMES = 40
_MAX_DOTS = 300


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


def _samples(entry: Entry) -> list[float]:
    samples = [ms for run in entry.configuration.runs for ms in run.window.samples_ms]
    return samples[:: max(1, -(-len(samples) // _MAX_DOTS))]


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


_MAX_RANKS = 8


def draw_memory(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure: a bar for each rank, the heaviest eight of a configuration.

    Bars are split by category where every configuration has a ledger, else coloured by strategy.
    """
    axes = figure.add_subplot()
    largest = max(max(memory_by_rank(entry.run).values()) for entry in entries)
    unit, scale = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
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


def _heaviest(entry: Entry) -> list[int]:
    peaks = memory_by_rank(entry.run)
    return sorted(sorted(peaks, key=lambda rank: -peaks[rank])[:_MAX_RANKS])


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
