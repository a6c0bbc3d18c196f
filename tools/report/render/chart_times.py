"""Iteration times: every sample, median and interval, a row for each configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools.report.analyse.entry import Entry
from tools.report.canvas import INK, WIDTH_INCHES, colour, grid, names
from tools.text.units import number

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
