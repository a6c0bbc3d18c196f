"""How far a predicted time is to be trusted: what measurements like it were missed by, public and one's
own.

Published measurements are predicted with their own source left out of the fit. One's own correct the
time and then give its interval by what is left of each when the others correct it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import exp, log2
from typing import Any

from parakit.config.run import RunSpec
from parakit.costs import UnevenSplitError, total_parameters
from parakit.formatting.units import duration, joined, plural
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
from parakit.planner.readings.table import PublishedMeasurement, read_measurements
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.iteration import iteration_seconds
from parakit.planner.time.rates import NoPeakError

_LIKE = 8
"""Readings that are looked at."""
_FAR = 6.0
"""Doublings, over parameters, devices, degrees and sequence together, beyond which nothing is alike."""
_MIXTURE = 2.0
"""Doublings that a dense model and a mixture of experts are apart."""
_LEVELS = (0.80, 0.95)
_TIMED = ("step_time_s", "tokens_per_s_per_gpu")


@dataclass(frozen=True)
class Uncertainty:
    """What is known of a prediction's error."""

    device: str
    seconds: float
    """Predicted, corrected by one's own runs."""
    bias: float = 0.0
    """Logarithm of uncorrected over corrected."""
    own: tuple[float, ...] = ()
    """Errors that are left of one's own runs; empty where they are too few for an interval."""
    own_runs: int = 0
    public: tuple[tuple[float, Residual], ...] = ()
    """The nearest published measurements with their distance, nearest first."""
    expected: TimeInterval | None = None
    """How far public times of its kind were missed."""

    def interval(self, level: float = 0.80) -> tuple[float, float] | None:
        """Least and most seconds: by one's own runs, whatever the level, else by the time's kind."""
        if self.own:
            return self.seconds / (1 + max(self.own)), self.seconds / (1 + min(self.own))
        return self.expected.seconds(self.seconds, level) if self.expected else None

    @property
    def warning(self) -> str:
        """What is to be said before a prediction that lies outside of its own interval; else empty."""
        found = self.interval(_LEVELS[0])
        if found is None or found[0] <= self.seconds <= found[1]:
            return ""
        *ends, predicted = map(duration, (*found, self.seconds))
        if predicted in ends:
            return ""
        longer = found[0] > self.seconds
        return (
            f"Four of five measurements of this kind took {'longer' if longer else 'less'} than was "
            f"predicted: expect {' to '.join(ends)} in place of the {predicted} below."
        )

    def __str__(self) -> str:
        if not self.own_runs:
            return self._public_sentence()
        left, way = "", _missed(exp(self.bias) - 1)
        if self.own:
            ends = (f"{ratio:+.0%}".replace("-", "−") for ratio in (min(self.own), max(self.own)))
            left = f"; corrected by the others, their errors are {'…'.join(ends)}"
        say = "says" if self.own_runs == 1 else "say"
        return (
            f"Corrected by {plural(self.own_runs, 'run')} of your own on {self.device}, which {say} it "
            f"is predicted {way}{left}. {self._public_sentence()}"
        )

    def _public_sentence(self) -> str:
        nearest = joined([_measured(item) for _, item in self.public[:2]])
        near = f"measured near this: {nearest}." if nearest else "none was near this."
        if self.expected is None:
            if nearest:
                return f"Too few measurements of its kind for an interval; {near}"
            end = "." if self.own else ", so its time has no interval."
            return f"No published measurement on {self.device} is near this{end}"
        inside, most = (
            " to ".join(map(duration, self.expected.seconds(self.seconds, level)))
            for level in _LEVELS
        )
        return (
            f"Expect {inside} (80%; 95%: {most}), by {self.expected.measurements:,} published "
            f"measurements of its kind; {near}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as data: errors are ratios, `distance` is in doublings."""
        nearest = [
            {
                "source": i.measurement.source,
                "line": i.measurement.line,
                "distance": d,
                "held_out_error": i.error,
            }
            for d, i in self.public
        ]
        return {
            "interval_80": self.interval(0.80),
            "interval_95": self.interval(0.95),
            "warning": self.warning,
            "nearest": nearest,
            "own_runs": self.own_runs,
            "own_bias": exp(self.bias) - 1,
            "own_errors": list(self.own),
        }


def estimate_uncertainty(spec: RunSpec, cluster: Cluster, own: OwnRuns) -> Uncertainty:
    """The error to expect of a predicted time; one's own runs are of the cluster's device, or none."""
    seconds = iteration_seconds(spec, cluster).total / exp(bias := own.bias(spec))
    known = (own.remaining(), len(own.residuals), tuple(find_near_residuals(spec, cluster)))
    kind = load_public_errors().expected(spec, cluster, seconds)
    return Uncertainty(cluster.device.name, seconds, bias, *known, kind)


def find_near_residuals(spec: RunSpec, cluster: Cluster) -> list[tuple[float, Residual]]:
    """The nearest timed readings on the same device with their held-out residuals, nearest first."""
    gpu, parameters = cluster.device.key.split("-")[0], total_parameters(spec.shape)
    placed = [
        (distance, measurement.line, place)
        for place, (measurement, _) in enumerate(_readings())
        if measurement.gpu.lower().split("-")[0] == gpu
        and (distance := _distance(measurement, spec, cluster, parameters)) is not None
    ]
    found: list[tuple[float, Residual]] = []
    layouts: set[tuple[object, ...]] = set()
    for distance, _, place in sorted(placed):
        if distance > _FAR or len(found) == _LIKE:
            break
        measurement, known = _readings()[place]
        # What later releases measure again: one of them is enough.
        degrees = (
            measurement.gpus,
            measurement.tp,
            measurement.pp,
            measurement.vpp,
            measurement.cp,
            measurement.ep,
        )
        batch = (
            measurement.mbs,
            measurement.gbs,
            measurement.seq,
            measurement.dtype,
            known and place,
        )
        layout = (*degrees, *batch, measurement.source, measurement.model, measurement.gpu)
        # What another trainer takes, or a host that waits for every kernel, says nothing of a plan.
        facts = source_facts(measurement)
        if layout in layouts or "trainer" in facts or facts["blocking"]:
            continue
        try:
            near = compute_residual(
                use_constants_without_source(
                    known or convert_measurement(measurement), measurement.source
                )
            )
        except (RefusedError, UnevenSplitError, NoPeakError):
            continue
        found.append((distance, near))
        layouts.add(layout)
    return found


@cache
def _readings() -> tuple[tuple[PublishedMeasurement, MeasuredRun | None], ...]:
    """Timed readings of the file and the published runs of the kit, which are expressed already."""
    timed = [
        (measurement, None)
        for measurement in read_measurements()[0]
        if measurement.metric in _TIMED
    ]
    return (*timed, *((run.measurement, run) for run in kit_runs()))


def _distance(
    measurement: PublishedMeasurement, spec: RunSpec, cluster: Cluster, parameters: int
) -> float | None:
    split, shape = spec.parallelism, spec.shape
    if measurement.params_b is None or measurement.gpus is None:
        return None
    pairs = (
        (measurement.params_b * 1e9, parameters),
        (measurement.gpus, cluster.devices),
        (measurement.tp or 1, split.tensor),
        (measurement.pp or 1, split.pipeline),
        (measurement.cp or 1, split.context),
        (measurement.ep or 1, split.expert),
        (measurement.seq or shape.seq_length, shape.seq_length),
    )
    fewer = "8" in measurement.dtype or "4" in measurement.dtype
    as_wide = spec.dtype in ("fp16", "bf16") and fewer == bool(spec.fp8_recipe)
    routed = bool(measurement.expert_ffn or model_facts(measurement.model).get("experts"))
    other_kind = _MIXTURE if routed != bool(shape.experts) else 0.0
    return sum(abs(log2(one / two)) for one, two in pairs) + (0 if as_wide else 1) + other_kind


def _measured(item: Residual) -> str:
    measurement = item.measurement
    degrees = ((name.upper(), getattr(measurement, name) or 1) for name in ("tp", "pp", "cp"))
    layout = " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)
    where = f"{measurement.gpus:,} {measurement.gpu}" + (f", {layout}" if layout else "")
    unit = "s" if measurement.metric == "step_time_s" else "tokens/s a GPU"
    value = f"{measurement.value:,.0f}" if measurement.value >= 1000 else f"{measurement.value:.4g}"
    off = "within 1%" if abs(item.error) < 0.01 else _missed(item.error)
    return f"{measurement.params_b:g}B, {where}: {value} {unit} (predicted {off})"


def _missed(ratio: float) -> str:
    return f"{abs(ratio):.0%} too {'slow' if ratio > 0 else 'fast'}"
