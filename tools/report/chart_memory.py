"""Peak memory of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools.report.chart_canvas import WIDTH_INCHES, colour, grid, names
from tools.report.report_data import Entry
from tools.report.rows import memory_by_rank
from tools.report.wording import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_RANKS = 8


def draw_memory(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure: a bar for each rank, the heaviest eight of a configuration."""
    axes = figure.add_subplot()
    labels, ticks, height = names(entries), [], 0.0
    largest = max(max(memory_by_rank(entry.run).values()) for entry in entries)
    unit, scale = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    for place, entry in enumerate(entries):
        peaks = memory_by_rank(entry.run)
        ranks = sorted(sorted(peaks, key=lambda r: -peaks[r])[:_MAX_RANKS])
        heights = [height + 0.8 * k for k in range(len(ranks))]
        values = [peaks[rank] / scale for rank in ranks]
        axes.barh(heights, values, 0.7, color=colour(place), alpha=0.8)
        for y, rank in zip(heights, ranks, strict=True):
            axes.annotate(
                f"rank {rank}: {size(peaks[rank])}",
                (peaks[rank] / scale, y),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        ticks.append(sum(heights) / len(heights))
        height += 0.8 * len(ranks) + 0.5
    figure.set_size_inches(WIDTH_INCHES, 0.8 + 0.27 * height)
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(height - 0.4, -0.7)
    axes.set_xlim(0, largest / scale * 1.25)
    axes.set_xlabel(unit)
    grid(axes, "x")
