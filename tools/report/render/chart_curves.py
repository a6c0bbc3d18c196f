"""Charts of curves: losses with their differences from the reference, and device samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools.report.analyse.entry import Entry
from tools.report.analyse.parity import REFERENCE, Curve, last_digit, loss_curve
from tools.report.canvas import INK, WIDTH_INCHES, colour, grid, names
from tools.report.read.sources import DeviceSeries

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS = 1000


def draw_losses(figure: Figure, entries: Sequence[Entry]) -> None:
    """Fill a figure: losses above, differences below where a reference was compared with."""
    labels = names(entries)
    reference = next((e for e in entries if e.parity.verdict == REFERENCE), None)
    compared = [(place, e) for place, e in enumerate(entries) if e.parity.compared]
    if reference is None or not compared:
        _draw_curves(figure.add_subplot(), entries, labels)
    else:
        figure.set_size_inches(WIDTH_INCHES, 4.6)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
        _draw_curves(upper, entries, labels)
        upper.set_xlabel("")
        _draw_differences(lower, loss_curve(reference.run), compared)
    if len(entries) > 1:
        figure.legend(loc="outside right upper", handlelength=2.4)


def _draw_curves(axes: Axes, entries: Sequence[Entry], labels: Sequence[str]) -> None:
    for place, entry in enumerate(entries):
        curve = loss_curve(entry.run)
        steps = _thinned(sorted(curve))
        # Equal curves lie on one another: later ones are thinner and dashed, so that all show.
        axes.plot(
            steps,
            [curve[step] for step in steps],
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


def _draw_differences(axes: Axes, reference: Curve, compared: Sequence[tuple[int, Entry]]) -> None:
    for lane, (place, entry) in enumerate(compared):
        curve = loss_curve(entry.run)
        steps = _thinned(sorted(curve.keys() & reference.keys()))
        units = [(curve[s] - reference[s]) / last_digit(reference[s]) for s in steps]
        # A hair's breadth apart, because most differences are exactly 0.
        shift = 0.12 * (lane - (len(compared) - 1) / 2)
        axes.plot(
            [step + shift for step in steps],
            units,
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


def _thinned(steps: list[int]) -> list[int]:
    return steps[:: max(1, -(-len(steps) // _MAX_POINTS))]


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
