"""Iteration times: every sample, median and interval, a row for each configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools.report.chart_canvas import INK, WIDTH_INCHES, colour, grid, names
from tools.report.report_data import Entry
from tools.report.wording import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TIMES = 40
_MAX_DOTS = 300


def draw_times(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure."""
    figure.set_size_inches(WIDTH_INCHES, 0.8 + 0.44 * len(entries))
    axes = figure.add_subplot()
    for place, entry in enumerate(entries):
        _draw_row(axes, place, entry)
    axes.set_yticks(range(len(entries)), names(entries))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_xlim(left=0, right=axes.get_xlim()[1] * 1.04)
    axes.set_xlabel("ms an iteration")
    grid(axes, "x")


def _draw_row(axes: Axes, place: int, entry: Entry) -> None:
    row = entry.configuration
    samples = [ms for run in row.runs for ms in run.window.samples_ms]
    shown = samples[:: max(1, -(-len(samples) // _MAX_DOTS))]
    # Spread by the golden ratio: even, and the same in every drawing.
    heights = [place + 0.5 * ((k * 0.618034) % 1 - 0.5) for k in range(len(shown))]
    axes.scatter(shown, heights, s=14, color=colour(place), alpha=0.45, linewidths=0)
    found = row.estimate
    if found is None:
        return
    axes.vlines(found.median, place - 0.34, place + 0.34, color=INK, linewidth=1.6)
    if found.low is not None and found.high is not None:
        axes.hlines(place, found.low, found.high, color=INK, linewidth=4.5, alpha=0.7)
    edge = max(*shown, found.high or 0)
    axes.annotate(
        number(found.median), (edge, place), (8, 0), textcoords="offset points", va="center"
    )
