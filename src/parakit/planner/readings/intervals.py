"""Intervals of predictions at a stated level, from the errors of the nearest measurements.

Each measurement is predicted with constants fitted without its source; its interval is made of the
errors of other layouts alone, so that what it covers is a test. A source counts with the root of its
measurements: figures of one lab have more in common than figures of several. Ends are by split conformal
prediction (Lei et al., JASA 113, 2018): of n errors the next is at each of n + 1 places as likely.

`errors.csv` has what the public ones were missed by, as `make validate` wrote it.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import exp, log, log2
from pathlib import Path

from parakit.config.run import RunSpec
from parakit.costs import mfu, model_flops, total_parameters
from parakit.planner.readings.residual import Residual
from parakit.planner.time.cluster import Cluster

LEVELS = (0.50, 0.60, 0.70, 0.80, 0.90, 0.95)
ERRORS_FILE = Path(__file__).with_name("errors.csv")
_NEAREST = 60
"""Errors that an interval is made of, and all that are as near as the last of them."""
_LESS = 1.5
"""How much less each thing of a place tells than the one before it."""
_OTHER_DEVICE, _DOUBLED = 2.0, 0.5
"""Distance of two devices of a generation, and of twice the parameters or devices; the last thing of a
place has 1. These, the ratio above and the number of the nearest were chosen by what intervals cover:
of 36 choices near them the best, where 72 to 88 and 90 to 98% of each kind were wanted."""
_FAR = _LESS**7
"""Distance of busy devices from waiting ones, and less than that of another generation: no interval is
made of what is as far."""
_STRETCHED = 2.0
"""Of normal errors 95% are within 1.5 times the interval of 80%."""
_ENOUGH = 20
"""Errors that an interval is made of at least."""
_COLUMNS = ("kind", "device", "parameters_log2", "devices_log2", "source", "errors")
_BUSY = 0.15
"""Share of the dense 16-bit peak; functional tests and toy models reach less, and miss by more."""
_BRIEF_SECONDS = 1.0
"""Of an iteration. In less of it, what no formula knows weighs more; 1.25 covers the same."""

Interval = tuple[float, float]
"""Least and largest logarithm of predicted over published seconds, or bytes."""


@dataclass(frozen=True)
class ErrorFeatures:
    """What an error depends on."""

    kind: tuple[str, ...]
    """Words, the most telling first."""
    device: str
    parameters: float
    """Logarithm to base 2, as of devices."""
    devices: float


@dataclass(frozen=True)
class _Error:
    value: float
    source: str
    layout: int = 0
    """Hash of the run; 0 of what the file has."""


class PredictionErrors:
    """Errors by their places, and intervals that follow from the nearest."""

    def __init__(self, at: Mapping[ErrorFeatures, list[_Error]]) -> None:
        self._at = at
        self._by_distance: dict[ErrorFeatures, list[tuple[float, ErrorFeatures]]] = {}
        self._found: dict[tuple[ErrorFeatures, int, str], dict[float, Interval]] = {}

    @staticmethod
    def of(predicted: Iterable[Residual]) -> PredictionErrors:
        """Of any residuals."""
        at: dict[ErrorFeatures, list[_Error]] = defaultdict(list)
        for item in predicted:
            error = _Error(
                log(1 + item.error), item.measurement.source, hash(item.measured_run.spec)
            )
            at[_place_of(item)].append(error)
        return PredictionErrors(at)

    def beside(self, others: PredictionErrors) -> PredictionErrors:
        """These and others."""
        both = self._at.keys() | others._at.keys()
        return PredictionErrors(
            {at: [*self._at.get(at, ()), *others._at.get(at, ())] for at in both}
        )

    def interval(self, item: Residual, level: float) -> tuple[float, float]:
        """Least and most that may have been published, in the figure's own unit; what its source leaves
        out may have been anything that fits."""
        low, high = self._levels(item)[level]
        if item.seconds is None or item.measurement.metric == "step_time_s":
            low, high = -high, -low  # Not a rate: more is slower, or more memory.
        least, most = item.ranged or (item.predicted, item.predicted)
        return least * exp(low), most * exp(high)

    def covers(self, item: Residual, level: float, elsewhere: bool = False) -> bool:
        """Whether what was published lies inside; `elsewhere` if other sources alone make it."""
        low, high = self._levels(item, elsewhere)[level]
        return low <= log(1 + item.error) <= high

    def expected(self, spec: RunSpec, cluster: Cluster, seconds: float) -> TimeInterval | None:
        """Of the predicted time of an iteration; None where too few like it were measured."""
        near = self._near(_place(spec, cluster, seconds), lambda _: True)
        return TimeInterval(len(near), _quantiles(near)) if near else None

    def table(self) -> str:
        """`errors.csv`: a line for each place and source."""
        lines = []
        for at, errors in self._at.items():
            by_source = defaultdict[str, list[float]](list)
            for error in errors:
                by_source[error.source].append(error.value)
            words = ("|".join(at.kind), at.device, f"{at.parameters:g}", f"{at.devices:g}")
            for source, values in by_source.items():
                texts = " ".join(f"{value:.4f}" for value in sorted(values))
                lines.append(f"{','.join(words)},{source.replace(',', ';')},{texts}")
        return "\n".join([",".join(_COLUMNS), *sorted(lines), ""])

    def _levels(self, item: Residual, elsewhere: bool = False) -> dict[float, Interval]:
        key = (
            _place_of(item),
            hash(item.measured_run.spec),
            item.measurement.source if elsewhere else "",
        )
        if key not in self._found:
            place, layout, source = key
            near = self._near(place, lambda one: one.layout != layout and one.source != source)
            unknown = dict.fromkeys(LEVELS, (-log(2), log(2)))
            self._found[key] = _quantiles(near) if near else unknown
        return self._found[key]

    def _near(self, place: ErrorFeatures, keep: Callable[[_Error], bool]) -> list[_Error]:
        """The nearest, and all that are as near as the last of them; none where they are too few."""
        if place not in self._by_distance:
            away = ((_distance(place, other), other) for other in self._at)
            near = (each for each in away if each[0] < _FAR)
            self._by_distance[place] = sorted(near, key=lambda each: each[0])
        found, last = list[_Error](), 0.0
        for distance, at in self._by_distance[place]:
            if len(found) >= _NEAREST and distance > last:
                break
            found += filter(keep, self._at[at])
            last = distance
        return found if len(found) >= _ENOUGH else []


@dataclass(frozen=True)
class TimeInterval:
    """How far times like one were missed."""

    measurements: int
    errors: Mapping[float, Interval]
    """By level."""

    def seconds(self, predicted: float, level: float) -> tuple[float, float]:
        """Least and most that are to be expected."""
        low, high = self.errors[level]
        return predicted * exp(-high), predicted * exp(-low)


@cache
def load_public_errors() -> PredictionErrors:
    """Those of `errors.csv`."""
    at: dict[ErrorFeatures, list[_Error]] = defaultdict(list)
    with ERRORS_FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            kind, device, parameters, devices, source, values = (row[name] for name in _COLUMNS)
            place = ErrorFeatures(tuple(kind.split("|")), device, float(parameters), float(devices))
            at[place] += [_Error(float(value), source) for value in values.split()]
    return PredictionErrors(at)


def _quantiles(errors: list[_Error]) -> dict[float, Interval]:
    """Of so few errors the ends of the highest levels would be single ones: they are no further from the
    median than `_STRETCHED` times those of 80%."""
    sources = Counter(error.source for error in errors)
    weighed = sorted((error.value, sources[error.source] ** -0.5) for error in errors)
    whole = sum(weight for _, weight in weighed)
    count = whole**2 / sum(weight**2 for _, weight in weighed)  # Kish's effective number.
    middle, found = _quantile(weighed, whole / 2), dict[float, Interval]()
    for level in LEVELS:
        inside = min(1.0, (1 + level) / 2 * (count + 1) / count)
        low, high = (_quantile(weighed, side * whole) for side in (1 - inside, inside))
        if level > 0.80:
            least, most = (middle + _STRETCHED * (end - middle) for end in found[0.80])
            low, high = max(low, least), min(high, most)
        found[level] = (low, high)
    return found


def _quantile(weighed: list[tuple[float, float]], rest: float) -> float:
    """The value, of some in order, up to which that much of the weight lies."""
    for value, weight in weighed:
        rest -= weight
        if rest <= 0:
            return value
    return weighed[-1][0]


def _place_of(item: Residual) -> ErrorFeatures:
    return _place(item.measured_run.spec, item.measured_run.cluster, item.seconds)


@lru_cache(4096)
def _place(spec: RunSpec, cluster: Cluster, seconds: float | None) -> ErrorFeatures:
    shape, execution, device = spec.shape, cluster.execution, cluster.device
    layers = "experts" if shape.experts else "several kinds" if shape.blocks else "dense"
    # Devices are busy that are said to do more than wait for their host and for one another.
    peak = device.peak_flops("bf16") or device.peak_flops("fp16")
    flops = model_flops(shape, spec.batch.global_batch_size)
    is_busy = peak and seconds is not None and mfu(flops, seconds, cluster.devices, peak) >= _BUSY
    is_brief = seconds is not None and seconds < _BRIEF_SECONDS
    return ErrorFeatures(
        (
            "time" if seconds else "memory",
            "sharded" if layers == "dense" and spec.parallelism.sharding.shards_weights else layers,
            device.generation,
            "busy" if is_busy else "waiting",
            "brief" if is_brief else "",
            "8 bits" if spec.fp8_recipe else "16 bits",
            "context parallel" if spec.parallelism.context > 1 else "",
            "deterministic" if execution.deterministic else "",
            "fused attention" if spec.fused_attention else "",
            "blocking" if execution.blocking else "",
            "one node" if cluster.devices <= cluster.per_node else "nodes",
        ),
        device.key.split("-")[0],
        round(log2(total_parameters(shape)), 1),
        round(log2(cluster.devices), 1),
    )


def _distance(one: ErrorFeatures, other: ErrorFeatures) -> float:
    apart = _apart(one.kind, other.kind) + (_OTHER_DEVICE if one.device != other.device else 0.0)
    doubled = abs(one.parameters - other.parameters) + abs(one.devices - other.devices)
    return apart + _DOUBLED * doubled


@cache
def _apart(kind: tuple[str, ...], other: tuple[str, ...]) -> float:
    words = enumerate(zip(reversed(kind), reversed(other), strict=True))
    return sum(_LESS**place for place, (word, others) in words if word != others)
