"""The plans of one model on several numbers of devices: where scaling bends, why, and what failures cost.

`make plan MODEL=llama3-8b GPUS=128,512,1024 GPU=h100` prints the table, and `SVG=` draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log, log2, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parakit.formatting.presented import PresentedTable
from parakit.formatting.svg import svg_figure
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.units import DASH, duration
from parakit.planner.advice import component_name
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.request import build_request
from parakit.planner.result import NothingFitsError, PlanResult, plan_strategies
from parakit.planner.time.iteration import TIME_COMPONENTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

_BEND = 0.9
"""Fraction of the throughput per device that a doubling must keep. The first doubling below it is the bend."""
_SECONDS_PER_HOUR = 3600
_RANGE_LEVEL = 0.80
"""Probability of the ranges of times and efficiencies."""


@dataclass(frozen=True)
class Failures:
    """Rate of failures of the devices, and the time that a failure and a checkpoint cost."""

    device_hours: float
    """Mean time between failures of one device, in hours."""
    checkpoint_seconds: float
    """Seconds for which training stands still while a checkpoint is written."""
    restart_seconds: float
    """Seconds from a failure to the first step of the restarted job."""

    def job_mtbf_seconds(self, devices: int) -> float:
        """Return the mean time between failures of a job, any of whose devices stops it."""
        return self.device_hours * _SECONDS_PER_HOUR / devices

    def best_interval_seconds(self, devices: int) -> float:
        """Return the seconds of training between checkpoints that lose least (Young 1974, refined by Daly 2006).

        If a checkpoint takes more than twice the time between failures, the interval is that time.
        """
        mtbf, cost = self.job_mtbf_seconds(devices), self.checkpoint_seconds
        if cost >= 2 * mtbf:
            return mtbf
        ratio = sqrt(cost / (2 * mtbf))
        return sqrt(2 * cost * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - cost

    def goodput(self, devices: int) -> float:
        """Return the fraction of the wall time that advances training, with the best interval of checkpoints.

        This is the inverse of Daly's complete model for failures at random times (Daly 2006, equation 20).
        """
        mtbf = self.job_mtbf_seconds(devices)
        interval = self.best_interval_seconds(devices)
        try:
            lost = exp(self.restart_seconds / mtbf) * (
                exp((interval + self.checkpoint_seconds) / mtbf) - 1
            )
        except OverflowError:
            # The job fails so often that it hardly ever restarts.
            return 0.0
        return interval / (mtbf * lost)


@dataclass(frozen=True)
class ScalePoint:
    """Plan on one number of devices."""

    devices: int
    result: PlanResult | None
    """None if nothing fits."""

    @property
    def seconds(self) -> float | None:
        """Predicted seconds per iteration; None if nothing fits."""
        return self.result.winner.seconds.total if self.result else None

    @property
    def tokens_per_second(self) -> float | None:
        """Predicted throughput of all devices; None if nothing fits."""
        return self.result.winner.tokens_per_second if self.result else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Shortest and longest time to expect with 80% probability, in seconds; None if it is not known."""
        return self.result.uncertainty.interval(_RANGE_LEVEL) if self.result else None

    def component_fraction(self, name: str) -> float:
        """Return the fraction of the iteration that a component takes; 0 if nothing fits."""
        if self.result is None:
            return 0.0
        seconds = self.result.winner.seconds
        return float(getattr(seconds, name)) / seconds.total


@dataclass(frozen=True)
class Doubling:
    """Efficiency per doubling between two numbers of devices."""

    before: ScalePoint
    after: ScalePoint
    efficiency: float
    """Fraction of the throughput per device that one doubling keeps."""
    interval: tuple[float, float] | None
    """Range of the efficiency with 80% probability, for independent errors of both times; None if it is not known."""


@dataclass(frozen=True, repr=False)
class ScalingResult(PresentedTable):
    """Plans of a model on several numbers of devices, with one global batch."""

    points: tuple[ScalePoint, ...]
    global_batch: int
    tokens_per_sample: int
    failures: Failures | None

    @property
    def doublings(self) -> tuple[Doubling, ...]:
        """Efficiency between neighbouring numbers of devices on which the model fits."""
        fitting = [point for point in self.points if point.result]
        return tuple(map(compare_points, fitting, fitting[1:]))

    def show(self, console: Console) -> None:
        """Print the job, the table, and sentences on where scaling bends and what failures cost."""
        first = next(point.result for point in self.points if point.result)
        request = first.plan.request
        console.print(
            f"{request.model.name} on {request.cluster.device.name}, with the same global batch of "
            f"{self.global_batch:,} sequences of {self.tokens_per_sample:,} tokens on every number of GPUs.",
            highlight=False,
        )
        console.print(rich_table(self._build_table(), console.width))
        console.print(describe_bend(self.doublings), highlight=False)
        if self.failures:
            console.print(_describe_failures(self.failures), highlight=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the rows and the global batch as data."""
        return {"global_batch": self.global_batch, "points": list(self.to_rows())}

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per number of devices."""
        efficiency = {doubling.after.devices: doubling for doubling in self.doublings}
        rows = []
        for point in self.points:
            doubling = efficiency.get(point.devices)
            rows.append(
                {
                    "gpus": point.devices,
                    "strategy": point.result.winner.strategy if point.result else None,
                    "iteration_seconds": point.seconds,
                    "interval_80": point.interval,
                    "tokens_per_second": point.tokens_per_second,
                    "efficiency_per_doubling": doubling.efficiency if doubling else None,
                    "efficiency_interval_80": doubling.interval if doubling else None,
                    "goodput": self.failures.goodput(point.devices) if self.failures else None,
                }
            )
        return rows

    def _build_table(self) -> Table[ScalePoint]:
        """Return a table with one row per number of devices."""
        doublings = {doubling.after.devices: doubling for doubling in self.doublings}

        def write_strategy(point: ScalePoint) -> str:
            if point.result is None:
                return "nothing fits"
            return point.result.winner.strategy

        def write_efficiency(point: ScalePoint) -> str:
            doubling = doublings.get(point.devices)
            if doubling is None:
                return DASH
            low, high = doubling.interval or (None, None)
            spread = f" ({low:.0%} to {high:.0%})" if low is not None else ""
            return f"{doubling.efficiency:.0%}{spread}"

        columns = [
            Column[ScalePoint]("GPUs", lambda point: f"{point.devices:,}"),
            Column[ScalePoint]("strategy", write_strategy, right=False),
            Column[ScalePoint]("per iteration", lambda point: _write_seconds(point.seconds)),
            Column[ScalePoint]("80% range", lambda point: _write_range(point.interval)),
            Column[ScalePoint]("tokens/s", lambda point: _write_rate(point.tokens_per_second)),
            Column[ScalePoint]("kept per doubling", write_efficiency),
        ]
        failures = self.failures
        if failures:
            columns += [
                Column[ScalePoint](
                    "checkpoint every",
                    lambda point: _write_minutes(failures.best_interval_seconds(point.devices)),
                ),
                Column[ScalePoint](
                    "goodput", lambda point: f"{failures.goodput(point.devices):.1%}"
                ),
            ]
        return Table(tuple(columns), self.points, "Scaling")


def plan_scaling(
    options: PlanOptions, numbers: Sequence[int], failures: Failures | None
) -> ScalingResult:
    """Plan a model on several numbers of devices, with the same global batch on all of them.

    Without GLOBAL_BATCH= the batch is that of a plan on the most devices.

    Args:
        options: Options of the plan. The number of devices is ignored.
        numbers: Numbers of devices.
        failures: How often devices fail; None leaves failures out.

    Raises:
        NothingFitsError: The model fits on none of the numbers of devices.
        RequestError: Options contradict one another, or need a single number of devices.
    """
    if options.strategy or options.nodes:
        raise RequestError("GPUS= has several numbers; leave STRATEGY= and NODES= out.")
    counts = sorted(set(numbers))
    largest = build_request(replace(options, gpus=counts[-1]))
    batch = options.global_batch or largest.global_batch
    points = []
    reason = ""
    for devices in counts:
        asked = replace(options, gpus=devices, global_batch=batch, svg=None)
        try:
            points.append(ScalePoint(devices, plan_strategies(asked)))
        except NothingFitsError as error:
            reason = str(error)
            points.append(ScalePoint(devices, None))
    if not any(point.result for point in points):
        raise NothingFitsError(reason)
    seq_length = largest.template.shape.seq_length
    return ScalingResult(tuple(points), batch, seq_length, failures)


def compare_points(before: ScalePoint, after: ScalePoint) -> Doubling:
    """Return the efficiency per doubling between two numbers of devices on which the model fits."""
    assert before.tokens_per_second is not None
    assert after.tokens_per_second is not None
    doublings = log2(after.devices / before.devices)
    ratio = after.tokens_per_second / before.tokens_per_second * before.devices / after.devices
    spread = _log_spread(before, after)
    interval = None
    if spread is not None:
        interval = (
            (ratio * exp(-spread)) ** (1 / doublings),
            (ratio * exp(spread)) ** (1 / doublings),
        )
    return Doubling(before, after, ratio ** (1 / doublings), interval)


def _log_spread(before: ScalePoint, after: ScalePoint) -> float | None:
    """Return half the width of the range of a ratio of two times, as a logarithm; None if a range is not known."""
    widths = []
    for point in (before, after):
        if point.interval is None:
            return None
        low, high = point.interval
        widths.append(log(high / low) / 2)
    return hypot(*widths)


def describe_bend(doublings: Sequence[Doubling]) -> str:
    """Return sentences that say where scaling bends and which component of the iteration grows there.

    Scaling bends at the first doubling that keeps less than `_BEND` of the throughput per device.
    """
    for doubling in doublings:
        if doubling.efficiency >= _BEND:
            continue
        before, after = doubling.before, doubling.after
        growth = {
            name: after.component_fraction(name) - before.component_fraction(name)
            for name in TIME_COMPONENTS
        }
        grown = max(growth, key=growth.__getitem__)
        return (
            f"Scaling bends between {before.devices:,} and {after.devices:,} GPUs: a doubling keeps "
            f"{doubling.efficiency:.0%} of the throughput per GPU. The reason is "
            f"{component_name(grown)}, which grows from {before.component_fraction(grown):.0%} to "
            f"{after.component_fraction(grown):.0%} of the iteration."
        )
    if not doublings:
        return "One number of GPUs that fits has no efficiency."
    return f"Scaling does not bend: every doubling keeps at least {_BEND:.0%} of the throughput per GPU."


def _describe_failures(failures: Failures) -> str:
    """Return sentences with the assumptions behind the goodput."""
    return (
        f"Goodput assumes that a GPU fails once in {failures.device_hours:,.0f} hours, that a checkpoint stops "
        f"training for {duration(failures.checkpoint_seconds)}, and that a restart takes "
        f"{duration(failures.restart_seconds)}. Checkpoints are written at the interval that loses least."
    )


def draw_scaling(result: ScalingResult, path: Path) -> None:
    """Draw the time per iteration, the throughput and the efficiency per doubling over the number of GPUs, as SVG."""
    points = [point for point in result.points if point.seconds and point.tokens_per_second]
    devices = [point.devices for point in points]
    with svg_figure(path, "scaling", 12, 3.6, bbox_inches="tight") as figure:
        time, rate, efficiency = figure.subplots(1, 3)
        _draw_times(time, points)
        rates = [point.tokens_per_second or 0.0 for point in points]
        ideal = [rates[0] * count / devices[0] for count in devices]
        rate.plot(devices, ideal, color="#999999", linestyle="--", label="without loss")
        rate.plot(devices, rates, marker="o", color="#0072B2", label="predicted")
        rate.set_yscale("log")
        rate.set_ylabel("tokens per second")
        rate.legend(frameon=False)
        for doubling in result.doublings:
            if doubling.interval:
                efficiency.plot([doubling.after.devices] * 2, doubling.interval, color="#0072B2")
        ends = [doubling.after.devices for doubling in result.doublings]
        kept = [doubling.efficiency for doubling in result.doublings]
        efficiency.plot(ends, kept, marker="o", color="#0072B2")
        efficiency.axhline(_BEND, color="#B00020", linestyle="--", linewidth=1)
        efficiency.set_ylabel("throughput per GPU kept per doubling")
        for axes in (time, rate, efficiency):
            axes.set_xscale("log", base=2)
            axes.set_xticks(devices, [f"{count:,}" for count in devices])
            axes.set_xlabel("GPUs")
            axes.spines[["top", "right"]].set_visible(False)


def _draw_times(axes: Axes, points: Sequence[ScalePoint]) -> None:
    """Draw the time per iteration with its range over the number of GPUs."""
    devices = [point.devices for point in points]
    for point in points:
        if point.interval:
            axes.plot([point.devices] * 2, point.interval, color="#0072B2")
    axes.plot(devices, [point.seconds or 0.0 for point in points], marker="o", color="#0072B2")
    axes.set_yscale("log")
    axes.set_ylabel("seconds per iteration")


def _write_seconds(seconds: float | None) -> str:
    """Return a time, or a dash."""
    return DASH if seconds is None else duration(seconds)


def _write_rate(rate: float | None) -> str:
    """Return tokens per second, or a dash."""
    return DASH if rate is None else f"{rate:,.0f}"


def _write_range(interval: tuple[float, float] | None) -> str:
    """Return a range of times, or a dash."""
    return DASH if interval is None else f"{duration(interval[0])} to {duration(interval[1])}"


def _write_minutes(seconds: float) -> str:
    """Return a time in minutes."""
    return f"{seconds / 60:,.0f} min"
