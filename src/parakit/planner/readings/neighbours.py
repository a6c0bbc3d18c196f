"""The error to expect of a predicted time, from measurements of similar runs.

Published measurements are predicted with constants that were fitted without their own source. The user's own
measurements correct a predicted time. They also give its interval: the errors that remain of each when the others
correct it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import exp, log2
from typing import Any

from parakit.config.run import RunSpec
from parakit.costs import UnevenSplitError, total_parameters
from parakit.formatting.units import duration, plural
from parakit.planner.readings.facts import model_facts, source_facts
from parakit.planner.readings.intervals import TimeInterval, load_public_errors
from parakit.planner.readings.local_readings import OwnRuns
from parakit.planner.readings.published import kit_runs
from parakit.planner.readings.reading_to_spec import MeasuredRun, RefusedError, convert_measurement
from parakit.planner.readings.residual import (
    Residual,
    compute_residual,
    use_constants_without_source,
)
from parakit.planner.readings.table import (
    PublishedMeasurement,
    name_gpu_kind,
    read_shipped_measurements_on_gpu,
)
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.iteration import iteration_seconds
from parakit.planner.time.rates import NoPeakError

_MOST_NEIGHBOURS = 8
"""Published measurements that a prediction is compared with."""
_MOST_DISTANCE = 6.0
"""Doublings, over parameters, devices, parallel sizes and sequence together, beyond which a run is not similar."""
_EXPERTS_DISTANCE = 2.0
"""Doublings between a dense model and a mixture of experts."""
_LEVELS = (0.80, 0.95)
_TIMED_METRICS = ("step_time_s", "tokens_per_s_per_gpu")


type _TimedMeasurements = tuple[tuple[PublishedMeasurement, MeasuredRun | None], ...]
"""One pair per published measurement of a time: the measurement, and its run if it is converted already."""


@dataclass(frozen=True)
class Uncertainty:
    """Predicted time of a run, and the error that the prediction is expected to have."""

    device: str
    seconds: float
    """Predicted seconds per iteration, corrected by the user's own runs."""
    bias: float = 0.0
    """Logarithm of uncorrected over corrected seconds."""
    own_errors: tuple[float, ...] = ()
    """Errors of the user's own runs, each corrected by the others; empty if they are too few for an interval."""
    num_own_runs: int = 0
    neighbours: tuple[tuple[float, Residual], ...] = ()
    """The nearest published measurements with their distance, nearest first."""
    similar: TimeInterval | None = None
    """Interval from the errors of similar published measurements; None if there are too few."""

    def interval(self, level: float = 0.80) -> tuple[float, float] | None:
        """Return the smallest and the largest time to expect, in seconds.

        If the user has enough measured runs, the interval holds the errors of all of them, and `level` is ignored.
        Otherwise it holds the fraction `level` of the errors of similar published measurements. The result is None if
        too few similar runs were measured.
        """
        if self.own_errors:
            smallest_value = self.seconds / (1 + max(self.own_errors))
            return smallest_value, self.seconds / (1 + min(self.own_errors))
        return self.similar.seconds(self.seconds, level) if self.similar else None

    @property
    def missed_side(self) -> str:
        """Sentence that warns if the predicted time lies outside of the 80% interval, else an empty text.

        The text is also empty if the prediction and an end of the interval are equal when printed.
        """
        interval = self.interval(_LEVELS[0])
        if interval is None or interval[0] <= self.seconds <= interval[1]:
            return ""
        smallest_value, largest = interval
        if duration(self.seconds) in (duration(smallest_value), duration(largest)):
            return ""
        comparison = "longer" if smallest_value > self.seconds else "less"
        return f"Four of five measurements of this kind took {comparison} than was predicted."

    @property
    def warning(self) -> str:
        """The sentence `missed_side` with the interval to expect; empty if there is no such sentence."""
        interval = self.interval(_LEVELS[0])
        if interval is None or not self.missed_side:
            return ""
        smallest_value, largest = interval
        return (
            f"{self.missed_side.removesuffix('.')}: expect {duration(smallest_value)} to "
            f"{duration(largest)} in place of the {duration(self.seconds)} below."
        )

    @property
    def summary(self) -> str:
        """One or two sentences: the correction by the user's own runs, and the interval to expect."""
        sentences = [self._own_runs_sentence()] if self.num_own_runs else []
        if self.similar is not None:
            sentences.append(self._interval_sentence(self.similar))
        elif not self.neighbours:
            end = "." if self.own_errors else ", so its time has no interval."
            sentences.append(f"No published measurement on {self.device} is near this{end}")
        elif not self.own_errors:
            sentences.append("Too few similar runs were measured, so its time has no interval.")
        return " ".join(sentences)

    @property
    def neighbours_sentence(self) -> str:
        """Sentences with the two nearest published measurements and their errors; empty if none is near."""
        starts = ("The nearest measurement is", "The next one is")
        sentences = [
            f"{start} {_describe_neighbour(item)}."
            for start, (_, item) in zip(starts, self.neighbours, strict=False)
        ]
        return " ".join(sentences)

    @property
    def nearest_sentence(self) -> str:
        """Sentence with the nearest published measurement and its error; empty if none is near."""
        if not self.neighbours:
            return ""
        return f"The nearest measurement is {_describe_neighbour(self.neighbours[0][1])}."

    def __str__(self) -> str:
        return " ".join(filter(None, (self.summary, self.neighbours_sentence)))

    def _own_runs_sentence(self) -> str:
        """Return a sentence on how the user's own runs correct the prediction, and on the errors that remain."""
        remaining = ""
        if self.own_errors:
            smallest_value, largest = (
                f"{error:+.0%}".replace("-", "−")
                for error in (min(self.own_errors), max(self.own_errors))
            )
            remaining = (
                f"; corrected, your runs are predicted with errors of {smallest_value} to {largest}"
            )
        error = _describe_error(exp(self.bias) - 1)
        return (
            f"Corrected by {plural(self.num_own_runs, 'run')} of your own on {self.device}, without "
            f"which the prediction would be {error}{remaining}."
        )

    def _interval_sentence(self, similar: TimeInterval) -> str:
        """Return a sentence with the intervals of the iteration time at 80% and 95% probability, and their basis."""
        inside, largest = (
            " to ".join(map(duration, similar.seconds(self.seconds, level))) for level in _LEVELS
        )
        return (
            f"Expect {inside} with 80% probability, or {largest} with 95%, by the errors of "
            f"{similar.measurements:,} similar published runs."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the uncertainty as a dictionary for JSON.

        Times are in seconds. An error is a ratio minus 1. `distance` counts factors of 2 between the sizes of runs.
        """
        nearest = [
            {
                "source": residual.measurement.source,
                "line": residual.measurement.line,
                "distance": distance,
                "held_out_error": residual.error,
            }
            for distance, residual in self.neighbours
        ]
        return {
            "interval_80": self.interval(0.80),
            "interval_95": self.interval(0.95),
            "warning": self.warning,
            "nearest": nearest,
            "own_runs": self.num_own_runs,
            "own_bias": exp(self.bias) - 1,
            "own_errors": list(self.own_errors),
        }


def estimate_uncertainty(spec: RunSpec, cluster: Cluster, own_runs: OwnRuns) -> Uncertainty:
    """Predict the time of a run, and estimate the error of this prediction.

    Args:
        spec: The run.
        cluster: Cluster on which it runs.
        own_runs: The user's own runs on the cluster's device. They correct the prediction, and may be empty.
    """
    bias = own_runs.bias(spec)
    seconds = iteration_seconds(spec, cluster).total / exp(bias)
    return Uncertainty(
        cluster.device.name,
        seconds,
        bias,
        own_errors=own_runs.remaining(),
        num_own_runs=len(own_runs.residuals),
        neighbours=tuple(find_near_residuals(spec, cluster)),
        similar=load_public_errors().expected(spec, cluster, seconds),
    )


def find_near_residuals(spec: RunSpec, cluster: Cluster) -> list[tuple[float, Residual]]:
    """Return the published times of the most similar runs on the same device, with their predictions.

    Each pair has the distance from the run and the measurement, nearest first. A measurement is predicted with
    constants that were fitted without the measurements of its publication. If one configuration was measured several
    times, only the nearest measurement is returned. At most `_MOST_NEIGHBOURS` measurements are returned, and none
    that is further away than `_MOST_DISTANCE`.
    """
    near: list[tuple[float, Residual]] = []
    configurations: set[tuple[object, ...]] = set()
    timed = _timed_measurements(name_gpu_kind(cluster.device.key))
    for distance, index in _order_by_distance(spec, cluster, timed):
        if distance > _MOST_DISTANCE or len(near) == _MOST_NEIGHBOURS:
            break
        measurement, run = timed[index]
        configuration = (*_configuration_key(measurement), run and index)
        # Other trainers, and hosts that wait for every kernel, say nothing about runs of Megatron.
        facts = source_facts(measurement)
        is_other_software = "trainer" in facts or facts["blocking"]
        if configuration in configurations or is_other_software:
            continue
        try:
            held_out = use_constants_without_source(
                run or convert_measurement(measurement), measurement.source
            )
            residual = compute_residual(held_out)
        except (RefusedError, UnevenSplitError, NoPeakError):
            continue
        near.append((distance, residual))
        configurations.add(configuration)
    return near


def _order_by_distance(
    spec: RunSpec, cluster: Cluster, timed: _TimedMeasurements
) -> list[tuple[float, int]]:
    """Return one pair per measurement: its distance from the run, and its index in `timed`.

    The nearest measurement comes first. Measurements that do not state parameters or GPUs are left out.
    """
    parameters = total_parameters(spec.shape)
    ordered = []
    for index, (measurement, _) in enumerate(timed):
        distance = _distance_in_doublings(measurement, spec, cluster, parameters)
        if distance is not None:
            ordered.append((distance, measurement.line, index))
    return [(distance, index) for distance, _, index in sorted(ordered)]


def _configuration_key(measurement: PublishedMeasurement) -> tuple[object, ...]:
    """Return a key that is equal for measurements of one configuration, for example with two software releases."""
    degrees = (
        measurement.gpus,
        measurement.tp,
        measurement.pp,
        measurement.vpp,
        measurement.cp,
        measurement.ep,
    )
    batch = (measurement.mbs, measurement.gbs, measurement.seq, measurement.dtype)
    return (*degrees, *batch, measurement.source, measurement.model, measurement.gpu)


@cache
def _timed_measurements(gpu_kind: str) -> _TimedMeasurements:
    """Return one pair per published measurement of a time on a kind of GPU: the measurement, and its run or None.

    Measurements from the file have None, because they are not converted to runs yet. The kit's published
    measurements have their runs.
    """
    timed = [
        (measurement, None)
        for measurement in read_shipped_measurements_on_gpu(gpu_kind)
        if measurement.metric in _TIMED_METRICS
    ]
    published = [
        (run.measurement, run)
        for run in kit_runs()
        if name_gpu_kind(run.measurement.gpu) == gpu_kind
    ]
    return (*timed, *published)


def _distance_in_doublings(
    measurement: PublishedMeasurement, spec: RunSpec, cluster: Cluster, parameters: int
) -> float | None:
    """Return the distance between a measured run and a planned run.

    A factor of 2 between two sizes of the runs adds 1 to the distance. A different dtype adds 1. If only one of the
    models has experts, `_EXPERTS_DISTANCE` is added. The result is None if the measurement does not state its
    parameters or GPUs.

    Args:
        parameters: Number of parameters of the planned run.
    """
    split, shape = spec.parallelism, spec.shape
    if measurement.params_b is None or measurement.gpus is None:
        return None
    sizes = (
        (measurement.params_b * 1e9, parameters),
        (measurement.gpus, cluster.devices),
        (measurement.tp or 1, split.tensor),
        (measurement.pp or 1, split.pipeline),
        (measurement.cp or 1, split.context),
        (measurement.ep or 1, split.expert),
        (measurement.seq or shape.seq_length, shape.seq_length),
    )
    distance = sum(abs(log2(measured / planned)) for measured, planned in sizes)
    has_fewer_bits = "8" in measurement.dtype or "4" in measurement.dtype
    is_half = spec.dtype in ("fp16", "bf16")
    is_same_dtype = is_half and has_fewer_bits == bool(spec.fp8_recipe)
    if not is_same_dtype:
        distance += 1
    has_experts = bool(measurement.expert_ffn or model_facts(measurement.model).get("experts"))
    if has_experts != bool(shape.experts):
        distance += _EXPERTS_DISTANCE
    return distance


def _describe_neighbour(item: Residual) -> str:
    """Return text with the run, the source, the published value and the prediction error of a measurement.

    An example is `0.77B on 2 H200 in bf16, batch 64 (name of the source): 0.4372 s (predicted 2% too slow)`. A dtype or
    batch that the source does not state is left out.
    """
    measurement = item.measurement
    run = f"{measurement.params_b:g}B on {measurement.gpus:,} {measurement.gpu}"
    factors = []
    for name in ("tp", "pp", "cp"):
        degree = getattr(measurement, name) or 1
        if degree > 1:
            factors.append(f"{name.upper()}{degree}")
    if factors:
        run += f" as {' '.join(factors)}"
    if measurement.dtype:
        run += f" in {measurement.dtype}"
    if measurement.gbs:
        run += f", batch {measurement.gbs:,}"
    value = measurement.value
    figure = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    unit = "s" if measurement.metric == "step_time_s" else "tokens/s per GPU"
    error = "within 1%" if abs(item.error) < 0.01 else _describe_error(item.error)
    return f"{run} ({measurement.source}): {figure} {unit} (predicted {error})"


def _describe_error(ratio: float) -> str:
    """Return an error of a time in words, such as `2% too slow`."""
    return f"{abs(ratio):.0%} too {'slow' if ratio > 0 else 'fast'}"
