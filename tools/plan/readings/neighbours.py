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

from tools.plan.readings.facts import model_facts, source_facts
from tools.plan.readings.local_readings import OwnRuns
from tools.plan.readings.published import kit_runs
from tools.plan.readings.reading_to_spec import Expressed, RefusedError, express
from tools.plan.readings.residual import Residual, left_out, residual
from tools.plan.readings.table import Reading, read_readings
from tools.plan.tensors import UnevenSplitError, parameters_total
from tools.plan.time.cluster import Cluster
from tools.plan.time.iteration import iteration_seconds
from tools.plan.time.rates import NoPeakError
from tools.spec.run import RunSpec
from tools.text.units import duration, joined

_LIKE = 8
"""Readings that an interval is made of."""
_FAR = 6.0
"""Doublings, over parameters, devices, degrees and sequence together, beyond which nothing is alike."""
_MIXTURE = 2.0
"""Doublings that a dense model and a mixture of experts are apart."""
_TIMED = ("step_time_s", "tokens_per_s_per_gpu")
_ENOUGH = 3


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

    @property
    def errors(self) -> tuple[float, ...]:
        """Ratios less 1, positive where predicted too slow; empty where nothing near was measured."""
        if self.own:
            return self.own
        found = tuple(item.error for _, item in self.public)
        return found if len(found) >= _ENOUGH else ()

    @property
    def interval(self) -> tuple[float, float] | None:
        """Least and most seconds by those errors."""
        if not self.errors:
            return None
        return self.seconds / (1 + max(self.errors)), self.seconds / (1 + min(self.errors))

    @property
    def warning(self) -> str:
        """What is to be said before a prediction that lies outside of its own interval; else empty."""
        if self.interval is None or self.interval[0] <= self.seconds <= self.interval[1]:
            return ""
        longer = min(self.interval) > self.seconds
        return (
            f"All measurements like this took {'longer' if longer else 'less'} than was predicted: "
            f"expect {' to '.join(duration(each) for each in self.interval)} in place of the "
            f"{duration(self.seconds)} below."
        )

    def __str__(self) -> str:
        said = [self._own_sentence()] if self.own_runs else []
        return " ".join([*said, self._public_sentence()])

    def _own_sentence(self) -> str:
        runs = f"{self.own_runs} run{'s' * (self.own_runs > 1)} of your own"
        off = exp(self.bias) - 1
        way = f"{abs(off):.0%} too {'slow' if off > 0 else 'fast'}"
        left = ""
        if self.own:
            left = f"; corrected by the others, their errors are {_range(self.own)}"
        say = "says" if self.own_runs == 1 else "say"
        return f"Corrected by {runs} on {self.device}, which {say} it is predicted {way}{left}."

    def _public_sentence(self) -> str:
        found = self.public
        if not found:
            sentence = f"No published measurement on {self.device} is near this"
            return f"{sentence}." if self.own else f"{sentence}, so its time has no interval."
        nearest = joined([_measured(item.reading) for _, item in found[:2]])
        if len(found) < _ENOUGH:
            return (
                f"Too few published measurements are like this for an interval; measured on "
                f"{self.device}: "
                f"{nearest}."
            )
        return (
            f"Held-out error of {len(found)} measurements like this: "
            f"{_range(tuple(item.error for _, item in found))} (positive: predicted too slow); "
            f"measured: {nearest}."
        )

    def as_data(self) -> dict[str, Any]:
        """The same as data: errors are ratios, `distance` is in doublings."""
        return {
            "interval_seconds": self.interval,
            "warning": self.warning,
            "held_out_errors": [item.error for _, item in self.public],
            "nearest": [
                {"source": i.reading.source, "line": i.reading.line, "distance": d}
                for d, i in self.public
            ],
            "own_runs": self.own_runs,
            "own_bias": exp(self.bias) - 1,
            "own_errors": list(self.own),
        }


def uncertainty(spec: RunSpec, cluster: Cluster, own: OwnRuns) -> Uncertainty:
    """The error to expect of a predicted time; one's own runs are of the cluster's device, or none."""
    bias = own.bias(spec)
    seconds = iteration_seconds(spec, cluster).total / exp(bias)
    near = tuple(near_residuals(spec, cluster))
    count = len(own.residuals)
    return Uncertainty(cluster.device.name, seconds, bias, own.remaining(), count, near)


def near_residuals(spec: RunSpec, cluster: Cluster) -> list[tuple[float, Residual]]:
    """The nearest timed readings on the same device with their held-out residuals, nearest first."""
    gpu, parameters = cluster.device.key.split("-")[0], parameters_total(spec.shape)
    placed = [
        (distance, reading.line, place)
        for place, (reading, _) in enumerate(_readings())
        if reading.gpu.lower().split("-")[0] == gpu
        and (distance := _distance(reading, spec, cluster, parameters)) is not None
    ]
    found: list[tuple[float, Residual]] = []
    layouts: set[tuple[object, ...]] = set()
    for distance, _, place in sorted(placed):
        if distance > _FAR or len(found) == _LIKE:
            break
        reading, known = _readings()[place]
        layout = (*_layout(reading), *((place,) if known else ()))
        # What another trainer takes, or a host that waits for every kernel, says nothing of a plan.
        facts = source_facts(reading)
        if layout in layouts or "trainer" in facts or facts["blocking"]:
            continue
        try:
            near = residual(left_out(known or express(reading), reading.source))
        except (RefusedError, UnevenSplitError, NoPeakError):
            continue
        found.append((distance, near))
        layouts.add(layout)
    return found


def _layout(reading: Reading) -> tuple[object, ...]:
    """What later releases measure again: one of them is enough."""
    degrees = (reading.gpus, reading.tp, reading.pp, reading.vpp, reading.cp, reading.ep)
    batch = (reading.mbs, reading.gbs, reading.seq, reading.dtype)
    return (*degrees, *batch, reading.source, reading.model, reading.gpu)


@cache
def _readings() -> tuple[tuple[Reading, Expressed | None], ...]:
    """Timed readings of the file and the published runs of the kit, which are expressed already."""
    timed = [(reading, None) for reading in read_readings()[0] if reading.metric in _TIMED]
    return (*timed, *((run.reading, run) for run in kit_runs()))


def _distance(reading: Reading, spec: RunSpec, cluster: Cluster, parameters: int) -> float | None:
    split, shape = spec.parallelism, spec.shape
    if reading.params_b is None or reading.gpus is None:
        return None
    pairs = (
        (reading.params_b * 1e9, parameters),
        (reading.gpus, cluster.devices),
        (reading.tp or 1, split.tensor),
        (reading.pp or 1, split.pipeline),
        (reading.cp or 1, split.context),
        (reading.ep or 1, split.expert),
        (reading.seq or shape.seq_length, shape.seq_length),
    )
    fewer = "8" in reading.dtype or "4" in reading.dtype
    as_wide = spec.dtype in ("fp16", "bf16") and fewer == bool(spec.fp8_recipe)
    routed = bool(reading.expert_ffn or model_facts(reading.model).get("experts"))
    other_kind = _MIXTURE if routed != bool(shape.experts) else 0.0
    return sum(abs(log2(one / two)) for one, two in pairs) + (0 if as_wide else 1) + other_kind


def _measured(reading: Reading) -> str:
    degrees = ((name.upper(), getattr(reading, name) or 1) for name in ("tp", "pp", "cp"))
    layout = " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)
    where = f"{reading.gpus:,} {reading.gpu}" + (f", {layout}" if layout else "")
    unit = "s" if reading.metric == "step_time_s" else "tokens/s a GPU"
    value = f"{reading.value:,.0f}" if reading.value >= 1000 else f"{reading.value:.4g}"
    return f"{reading.params_b:g}B, {where}: {value} {unit}"


def _range(errors: tuple[float, ...]) -> str:
    return f"{_signed(min(errors))}…{_signed(max(errors))}"


def _signed(ratio: float) -> str:
    return f"{ratio:+.0%}".replace("-", "−")
