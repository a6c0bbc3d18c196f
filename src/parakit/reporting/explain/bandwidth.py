"""Iteration time against the rate of the link between the ranks: measured, and what a formula adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from parakit.config.run import Backend
from parakit.costs import NUM_NODES, link_seconds, seconds_at_other_rate
from parakit.logs import Run
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.canvas import WIDTH_INCHES, add_grid, entry_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PREDICTED_BITS_PER_SECOND = (100e9, 400e9)
"""Rates that CPU ranks do not reach and GPUs' networks have."""


@dataclass(frozen=True)
class RateCurve:
    """One strategy over all rates it ran at."""

    name: str
    points: tuple[tuple[float, float], ...]
    """Bits a second and milliseconds, measured behind a shaped link, slowest first."""
    unshaped: float | None
    """Milliseconds without a limit, where the ranks' own processors are the limit."""
    sent_seconds: float | None
    """That the link is busy for one iteration at 1 bit/s; None without a communication ledger."""

    def predicted(self, bits_per_second: float) -> float | None:
        """Milliseconds at a rate, from the fastest measured point and the bytes alone."""
        if self.sent_seconds is None:
            return None
        rate, fastest = self.points[-1]
        return 1e3 * seconds_at_other_rate(
            fastest / 1e3, self.sent_seconds / rate, rate, bits_per_second
        )


def rate_curves(entries: Sequence[Entry]) -> list[RateCurve]:
    """Strategies of one model that ran behind a shaped link; the first model's, if several did."""
    shaped = [entry for entry in entries if _rate(entry.run)]
    setups = {_same(entry): entry for entry in shaped if entry.run.model == shaped[0].run.model}
    curves = []
    for same, entry in setups.items():
        spec = entry.run.spec
        if entry.estimate is None or spec is None:
            continue
        timed = [(_rate(e.run), e.time_ms) for e in entries if _same(e) == same]
        points = [(rate, time) for rate, time in timed if rate and time is not None]
        unshaped = [time for rate, time in timed if not rate and time is not None]
        backend = "" if spec.backend == Backend.MEGATRON else f"{spec.backend} "
        curves.append(
            RateCurve(
                name=f"{backend}{spec.name} ×{spec.parallelism.world_size}",
                points=tuple(sorted(points, key=itemgetter(0))),
                unshaped=unshaped[-1] if unshaped else None,
                sent_seconds=busy_seconds_at_one_bit(entry.run),
            )
        )
    return curves


def busy_seconds_at_one_bit(run: Run) -> float | None:
    """`link_seconds` of the busiest rank at 1 bit/s, from the run's own ledger."""
    record, spec = run.measurements.communication, run.spec
    if record is None or spec is None or spec.parallelism.world_size % NUM_NODES:
        return None
    counted = [rank for rank in record.ranks if rank.steady_iterations]
    return max((link_seconds(r.calls, spec.parallelism, 1.0) for r in counted), default=None)


def _rate(run: Run) -> int | None:
    return run.spec.link_bits_per_second if run.spec else None


def _same(entry: Entry) -> tuple[object, ...]:
    """What a curve's points share: backend, model, split, batch and dropout."""
    spec = entry.run.spec
    if spec is None:
        return (entry.run.name,)
    return spec.backend, spec.model, spec.parallelism, spec.batch, spec.dropout


_GIGA = 1e9
_STEPS = 60


def draw_bandwidth(figure: Figure, curves: Sequence[RateCurve]) -> None:
    """Fill a figure: dots are measured, dashed lines and rings are the formula's."""
    figure.set_size_inches(WIDTH_INCHES, 4.2)
    axes = figure.add_subplot()
    for place, curve in enumerate(curves):
        hue = entry_colour(place)
        dots = [(rate / _GIGA, time) for rate, time in curve.points]
        look: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5}
        axes.plot(*zip(*dots, strict=True), color=hue, label=curve.name, **look)
        if curve.unshaped is not None:
            # At the edge, because there is no rate: the processors are the limit.
            axes.axhline(curve.unshaped, xmin=0.985, color=hue, linewidth=2.4)
        slowest, last = curve.points[0][0], PREDICTED_BITS_PER_SECOND[-1]
        steps = [slowest * (last / slowest) ** (k / _STEPS) for k in range(_STEPS + 1)]
        if line := _predicted(curve, steps):
            axes.plot(*zip(*line, strict=True), color=hue, linewidth=1, linestyle=(0, (4, 3)))
        for rate, ms in _predicted(curve, PREDICTED_BITS_PER_SECOND):
            axes.plot(rate, ms, marker="o", markersize=6, markerfacecolor="none", color=hue)
    axes.set_xscale("log")
    rates = sorted({rate for c in curves for rate, _ in c.points} | {*PREDICTED_BITS_PER_SECOND})
    axes.set_xticks([rate / _GIGA for rate in rates], [f"{rate / _GIGA:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Gbit/s between the two halves of the ranks (logarithmic)")
    axes.set_ylabel("ms an iteration")
    add_grid(axes)
    figure.legend(loc="outside right upper", handlelength=2.4)


def _predicted(curve: RateCurve, rates: Sequence[float]) -> list[tuple[float, float]]:
    found = [(rate / _GIGA, curve.predicted(rate)) for rate in rates]
    return [(rate, ms) for rate, ms in found if ms is not None and ms > 0]
