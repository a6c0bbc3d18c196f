"""Time lines of device samples: utilisation and memory of each rank's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools.report.analyse.entry import Entry
from tools.report.canvas import WIDTH_INCHES, colour, grid, names
from tools.report.read.samples import DeviceSeries

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_RANKS = 8


def draw_devices(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure: a row for each configuration, utilisation left, memory right."""
    figure.set_size_inches(WIDTH_INCHES, 0.5 + 1.15 * len(entries))
    grid_of_axes = figure.subplots(len(entries), 2, squeeze=False, sharey="col")
    for row, (entry, label) in enumerate(zip(entries, names(entries), strict=True)):
        left, right = grid_of_axes[row]
        for series in entry.run.samples.series[:_MAX_RANKS]:
            _draw_series(left, series, series.utilisation_percent, 1)
            _draw_series(right, series, series.memory_bytes, 2**30)
        left.set_ylabel(label, rotation=0, ha="right", va="center")
        for axes in (left, right):
            axes.set_ylim(bottom=0)
            grid(axes)
    cpu = all(entry.run.device == "cpu" for entry in entries)
    grid_of_axes[0][0].set_title("% of a core" if cpu else "% busy")
    grid_of_axes[0][1].set_title("resident memory, GiB" if cpu else "device memory, GiB")
    for axes in grid_of_axes[-1]:
        axes.set_xlabel("seconds")
    busiest = max(grid_of_axes, key=lambda row: len(row[0].lines))[0]
    if len(busiest.lines) > 1:
        figure.legend(handles=busiest.lines, loc="outside upper right", ncols=8, fontsize=8)


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
