"""Iteration time against the bandwidth between the ranks: measured points and the planner's formula.

The input is a report's rows that ran behind a shaped link (`NET=`), and those without a limit. The result
is a curve per strategy. The formula changes only the time that a strategy's bytes need on the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from parakit.config.run import Backend, RunSpec
from parakit.costs import NUM_NODES, link_seconds, seconds_at_other_rate
from parakit.logs import Run
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.canvas import WIDTH_INCHES, add_grid, entry_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PREDICTED_BITS_PER_SECOND = (100e9, 400e9)
"""Bandwidths that are predicted only: networks of GPUs have them, and CPU ranks do not reach them."""
_BITS_PER_GIGABIT = 1e9
_POINTS_PER_CURVE = 60


@dataclass(frozen=True)
class RateCurve:
    """Iteration times of one strategy at every bandwidth at which it ran."""

    name: str
    points: tuple[tuple[float, float], ...]
    """Bits per second and milliseconds per iteration, as measured; the slowest link comes first."""
    unshaped: float | None
    """Milliseconds per iteration without a limit on the link; None if no such run was timed."""
    sent_seconds: float | None
    """Seconds per iteration that the link would be busy at 1 bit/s; None without a communication log."""

    def predict_ms(self, bits_per_second: float) -> float | None:
        """Return the predicted milliseconds per iteration at a bandwidth; None without a communication log.

        The prediction starts from the time that was measured at the highest bandwidth.
        """
        if self.sent_seconds is None:
            return None
        fastest_rate, milliseconds = self.points[-1]
        seconds = seconds_at_other_rate(
            milliseconds / 1e3, self.sent_seconds / fastest_rate, fastest_rate, bits_per_second
        )
        return 1e3 * seconds


def rate_curves(entries: Sequence[Entry]) -> list[RateCurve]:
    """Return a curve for each strategy that ran on a link with a bandwidth limit; empty if there is no such run.

    All curves are of one model: the model of the first entry with a bandwidth limit. Strategies without a
    measured iteration time are left out.
    """
    shaped_entries = [entry for entry in entries if _link_rate(entry.run)]
    entry_by_identity: dict[tuple[object, ...], Entry] = {}
    for entry in shaped_entries:
        if entry.run.model == shaped_entries[0].run.model:
            entry_by_identity[_curve_identity(entry)] = entry
    curves = []
    for identity, entry in entry_by_identity.items():
        if entry.estimate is not None and entry.run.spec is not None:
            same_entries = [other for other in entries if _curve_identity(other) == identity]
            curves.append(_build_curve(entry.run, entry.run.spec, same_entries))
    return curves


def _build_curve(run: Run, spec: RunSpec, entries: Sequence[Entry]) -> RateCurve:
    """Return the curve of one strategy; its points are ordered by bandwidth.

    Args:
        run: Run whose communication log gives the bytes.
        spec: Configuration of the run.
        entries: Rows of the strategy, of which those without a time are left out.
    """
    points: list[tuple[float, float]] = []
    unshaped_ms = None
    for entry in entries:
        if entry.time_ms is None:
            continue
        rate = _link_rate(entry.run)
        if rate:
            points.append((rate, entry.time_ms))
        else:
            unshaped_ms = entry.time_ms
    backend = "" if spec.backend == Backend.MEGATRON else f"{spec.backend} "
    return RateCurve(
        name=f"{backend}{spec.name} ×{spec.parallelism.world_size}",
        points=tuple(sorted(points, key=itemgetter(0))),
        unshaped=unshaped_ms,
        sent_seconds=busy_seconds_at_one_bit(run),
    )


def busy_seconds_at_one_bit(run: Run) -> float | None:
    """Return the seconds per iteration that the busiest rank's calls would take on a link of 1 bit/s.

    The bytes are those of the run's communication log. None means that the run has no such log or no known
    configuration, or that its ranks cannot be divided into two halves.
    """
    record, spec = run.measurements.communication, run.spec
    if record is None or spec is None or spec.parallelism.world_size % NUM_NODES:
        return None
    return max(
        (
            link_seconds(rank.calls, spec.parallelism, 1.0)
            for rank in record.ranks
            if rank.steady_iterations
        ),
        default=None,
    )


def _link_rate(run: Run) -> int | None:
    """Return the limit of the link between the ranks in bits per second; None without a limit."""
    return run.spec.link_bits_per_second if run.spec else None


def _curve_identity(entry: Entry) -> tuple[object, ...]:
    """Return the properties that all points of a curve share: backend, model, split, batch, dropout."""
    spec = entry.run.spec
    if spec is None:
        return (entry.run.name,)
    return spec.backend, spec.model, spec.parallelism, spec.batch, spec.dropout


def draw_bandwidth(figure: Figure, curves: Sequence[RateCurve]) -> None:
    """Draw milliseconds per iteration over bandwidth, with one colour per curve.

    Dots are measured times. Dashed lines and rings are predicted by the formula. A bar at the right edge is the
    time that was measured without a bandwidth limit.
    """
    figure.set_size_inches(WIDTH_INCHES, 4.2)
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        _draw_measured_times(axes, curve, entry_colour(index))
        _draw_predicted_times(axes, curve, entry_colour(index))
    axes.set_xscale("log")
    marked_rates = set(PREDICTED_BITS_PER_SECOND)
    for curve in curves:
        marked_rates.update(rate for rate, _ in curve.points)
    ticks = [rate / _BITS_PER_GIGABIT for rate in sorted(marked_rates)]
    axes.set_xticks(ticks, [f"{gigabits:g}" for gigabits in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Gbit/s between the two halves of the ranks (logarithmic)")
    axes.set_ylabel("ms per iteration")
    add_grid(axes)
    figure.legend(loc="outside right upper", handlelength=2.4)


def _draw_measured_times(axes: Axes, curve: RateCurve, colour: str) -> None:
    """Draw a dot per measured bandwidth, and a bar at the right edge for the time without a limit."""
    gigabits = [rate / _BITS_PER_GIGABIT for rate, _ in curve.points]
    milliseconds = [time_ms for _, time_ms in curve.points]
    look: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5}
    axes.plot(gigabits, milliseconds, color=colour, label=curve.name, **look)
    if curve.unshaped is not None:
        # Without a limit there is no bandwidth to draw at, so the bar stands at the right edge.
        axes.axhline(curve.unshaped, xmin=0.985, color=colour, linewidth=2.4)


def _draw_predicted_times(axes: Axes, curve: RateCurve, colour: str) -> None:
    """Draw the predicted times: a dashed line from the slowest measured bandwidth on, and rings without measurement."""
    slowest, fastest = curve.points[0][0], PREDICTED_BITS_PER_SECOND[-1]
    rates = [
        slowest * (fastest / slowest) ** (step / _POINTS_PER_CURVE)
        for step in range(_POINTS_PER_CURVE + 1)
    ]
    line = _predicted_points(curve, rates)
    if line:
        gigabits, milliseconds = zip(*line, strict=True)
        axes.plot(gigabits, milliseconds, color=colour, linewidth=1, linestyle=(0, (4, 3)))
    ring: dict[str, Any] = {"marker": "o", "markersize": 6, "markerfacecolor": "none"}
    for x, y in _predicted_points(curve, PREDICTED_BITS_PER_SECOND):
        axes.plot(x, y, color=colour, **ring)


def _predicted_points(curve: RateCurve, rates: Sequence[float]) -> list[tuple[float, float]]:
    """Return pairs of Gbit/s and predicted milliseconds. Bandwidths without a prediction are left out."""
    points = []
    for rate in rates:
        milliseconds = curve.predict_ms(rate)
        if milliseconds is not None and milliseconds > 0:
            points.append((rate / _BITS_PER_GIGABIT, milliseconds))
    return points
