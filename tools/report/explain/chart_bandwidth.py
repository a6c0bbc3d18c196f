"""Iteration time against the link's rate, by strategy; what was not measured is drawn as such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools.report.canvas import WIDTH_INCHES, colour, grid
from tools.report.explain.bandwidth import PREDICTED_BITS_PER_SECOND, RateCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIGA = 1e9
_STEPS = 60


def draw_bandwidth(figure: Figure, curves: Sequence[RateCurve]) -> None:
    """Fill a figure: dots are measured, dashed lines and rings are the formula's."""
    figure.set_size_inches(WIDTH_INCHES, 4.2)
    axes = figure.add_subplot()
    for place, curve in enumerate(curves):
        _draw_curve(axes, place, curve)
    axes.set_xscale("log")
    rates = sorted(
        {p.bits_per_second for c in curves for p in c.points} | {*PREDICTED_BITS_PER_SECOND}
    )
    axes.set_xticks([rate / _GIGA for rate in rates], [f"{rate / _GIGA:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Gbit/s between the two halves of the ranks (logarithmic)")
    axes.set_ylabel("ms an iteration")
    grid(axes)
    figure.legend(loc="outside right upper", handlelength=2.4)


def _draw_curve(axes: Axes, place: int, curve: RateCurve) -> None:
    xs = [point.bits_per_second / _GIGA for point in curve.points]
    axes.plot(
        xs,
        [point.milliseconds for point in curve.points],
        color=colour(place),
        linestyle="none",
        marker="o",
        markersize=5,
        label=curve.name,
    )
    if curve.unshaped is not None:
        # At the edge, because there is no rate: the processors are the limit.
        axes.axhline(curve.unshaped, xmin=0.985, color=colour(place), linewidth=2.4)
    slowest, last = curve.points[0].bits_per_second, PREDICTED_BITS_PER_SECOND[-1]
    steps = [slowest * (last / slowest) ** (k / _STEPS) for k in range(_STEPS + 1)]
    line = [(rate / _GIGA, curve.predicted(rate)) for rate in steps]
    known = [(rate, ms) for rate, ms in line if ms is not None and ms > 0]
    if known:
        axes.plot(
            *zip(*known, strict=True), color=colour(place), linewidth=1, linestyle=(0, (4, 3))
        )
    rings = [(rate / _GIGA, curve.predicted(rate)) for rate in PREDICTED_BITS_PER_SECOND]
    for rate, ms in rings:
        if ms is not None and ms > 0:
            axes.plot(
                rate, ms, marker="o", markersize=6, markerfacecolor="none", color=colour(place)
            )
