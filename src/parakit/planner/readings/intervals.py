"""Intervals of predictions at a stated level, from the errors of similar measurements.

Each published measurement is predicted with constants that were fitted without its source. The interval of a
measurement comes from errors of other configurations alone, so that the fraction of intervals that hold their
measurement is a test. A source with n errors counts with weight √n, because figures of one lab have more in common
than figures of several. The ends follow split conformal prediction (Lei et al., JASA 113, 2018). There are n + 1
positions among n sorted errors, and the next error is at each of them with the same probability.

`errors.csv` holds the errors of the public measurements, as `make validate` wrote them.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import exp, log, log2
from operator import itemgetter
from pathlib import Path

from parakit.config.run import RunSpec
from parakit.costs import mfu, model_flops, total_parameters
from parakit.planner.readings.residual import Residual
from parakit.planner.readings.table import name_gpu_kind
from parakit.planner.time.cluster import Cluster

LEVELS = (0.50, 0.60, 0.70, 0.80, 0.90, 0.95)
ERRORS_FILE = Path(__file__).with_name("errors.csv")
_NUM_NEAREST = 45
"""Errors from which an interval is made; errors as near as the last of them are added."""
_KIND_RATIO = 1.5
"""Ratio of the distances of two neighbouring words of a kind: each word tells more than the next one."""
_DEVICE_DISTANCE, _DOUBLING_DISTANCE = 2.0, 0.5
"""Distance of two devices of a generation, and of twice the parameters or devices. The last word of a kind has distance
1. These numbers, the ratio above and the number of the nearest errors were chosen by what the intervals cover: the best
of 90 choices near them, where 72 to 88% and 90 to 98% of each kind were wanted. Four kinds miss by one or two
measurements."""
_MOST_DISTANCE = _KIND_RATIO**7
"""Distance at which errors are no longer similar: that of busy devices from waiting ones, less than that of another
generation."""
_MOST_STRETCH = 2.0
"""Most width of an interval above 80%, relative to that of 80%. For normal errors the 95% interval is 1.5 times as
wide."""
_FEWEST_ERRORS = 20
"""Fewest errors from which an interval is made."""
_COLUMNS = ("kind", "device", "parameters_log2", "devices_log2", "source", "errors")
_BUSY_MFU = 0.15
"""Fraction of the dense 16-bit peak above which devices count as busy. Functional tests and toy models reach less, and
their predictions have larger errors."""
_BRIEF_SECONDS = 1.0
"""Seconds of an iteration below which effects outside the formulas weigh more; 1.25 covers as much."""

Interval = tuple[float, float]
"""Least and largest logarithm of predicted over published seconds, or bytes."""


@dataclass(frozen=True)
class ErrorFeatures:
    """Features of a run on which the error of its prediction depends."""

    kind: tuple[str, ...]
    """Words for the kind of run, the most telling first."""
    device: str
    parameters: float
    """Logarithm to base 2 of the number of parameters."""
    devices: float
    """Logarithm to base 2 of the number of devices."""


@dataclass(frozen=True)
class _Error:
    """Error of one prediction of a published measurement."""

    value: float
    """Logarithm of predicted over published."""
    source: str
    configuration: int = 0
    """Hash of the run; 0 for errors from the file."""


class PredictionErrors:
    """Errors of predictions, by the features of the predicted runs. Intervals are computed from these errors."""

    def __init__(self, errors_by_features: Mapping[ErrorFeatures, list[_Error]]) -> None:
        self._errors = errors_by_features
        self._features_by_kind: dict[tuple[str, ...], list[tuple[int, ErrorFeatures]]] = {}
        """Features of all errors with their numbers in order, by kind of run."""
        for number, features in enumerate(errors_by_features):
            self._features_by_kind.setdefault(features.kind, []).append((number, features))
        self._by_distance: dict[ErrorFeatures, list[tuple[float, ErrorFeatures]]] = {}
        self._intervals: dict[tuple[ErrorFeatures, int, str], dict[float, Interval]] = {}

    @staticmethod
    def collect(predicted: Iterable[Residual]) -> PredictionErrors:
        """Return the errors of predicted measurements, grouped by the features of their runs."""
        errors: dict[ErrorFeatures, list[_Error]] = defaultdict(list)
        for item in predicted:
            configuration = hash(item.measured_run.spec)
            error = _Error(log(1 + item.error), item.measurement.source, configuration)
            errors[_features_of_residual(item)].append(error)
        return PredictionErrors(errors)

    def merge(self, other: PredictionErrors) -> PredictionErrors:
        """Return these errors together with other errors."""
        features = self._errors.keys() | other._errors.keys()
        return PredictionErrors(
            {
                feature: [*self._errors.get(feature, ()), *other._errors.get(feature, ())]
                for feature in features
            }
        )

    def interval(self, item: Residual, level: float) -> tuple[float, float]:
        """Return the smallest and the largest value to expect of a published measurement, in the measurement's unit.

        The published value lies between them with the probability `level`. If the source does not state a size, such
        as the micro batch, the interval includes every run that the source may have measured.
        """
        low, high = self._intervals_of(item)[level]
        is_rate = item.seconds is not None and item.measurement.metric != "step_time_s"
        if not is_rate:
            low, high = -high, -low
        smallest_value, largest = item.ranged or (item.predicted, item.predicted)
        return smallest_value * exp(low), largest * exp(high)

    def find_covering_levels(self, item: Residual, elsewhere: bool = False) -> frozenset[float]:
        """Return the levels at which the published figure lies inside the interval of its prediction.

        If `elsewhere` is True, the intervals are made only from errors of other sources than the measurement's.
        """
        error = log(1 + item.error)
        intervals = self._intervals_of(item, elsewhere)
        return frozenset(level for level, (low, high) in intervals.items() if low <= error <= high)

    def expected(self, spec: RunSpec, cluster: Cluster, seconds: float) -> TimeInterval | None:
        """Return the intervals of a predicted time per iteration; None if too few similar runs were measured."""
        near = self._nearest_errors(_compute_features(spec, cluster, seconds), lambda _: True)
        return TimeInterval(len(near), _compute_intervals(near)) if near else None

    def to_csv(self) -> str:
        """Return the text of `errors.csv`: one line per source and kind of run, with the errors of all its runs."""
        lines = []
        for features, errors in self._errors.items():
            values_by_source = defaultdict[str, list[float]](list)
            for error in errors:
                values_by_source[error.source].append(error.value)
            cells = (
                "|".join(features.kind),
                features.device,
                f"{features.parameters:g}",
                f"{features.devices:g}",
            )
            for source, values in values_by_source.items():
                texts = " ".join(f"{value:.4f}" for value in sorted(values))
                lines.append(f"{','.join(cells)},{source.replace(',', ';')},{texts}")
        return "\n".join([",".join(_COLUMNS), *sorted(lines), ""])

    def _intervals_of(self, item: Residual, elsewhere: bool = False) -> dict[float, Interval]:
        """Return the intervals for the error of a measurement, by level, from errors of similar runs.

        Errors of the same configuration are left out. If `elsewhere` is True, all errors of the measurement's source
        are left out too. If there are too few similar errors, all intervals reach from half to twice the prediction.
        """
        features, configuration = _features_of_residual(item), hash(item.measured_run.spec)
        left_out_source = item.measurement.source if elsewhere else ""
        key = (features, configuration, left_out_source)
        if key not in self._intervals:
            near = self._nearest_errors(
                features,
                lambda error: (
                    error.configuration != configuration and error.source != left_out_source
                ),
            )
            unknown = dict.fromkeys(LEVELS, (-log(2), log(2)))
            self._intervals[key] = _compute_intervals(near) if near else unknown
        return self._intervals[key]

    def _nearest_errors(
        self, features: ErrorFeatures, keep: Callable[[_Error], bool]
    ) -> list[_Error]:
        """Return about `_NUM_NEAREST` errors of the runs that are most similar to a run with these features.

        Only errors for which `keep` is True are returned. The list may be longer, because errors of equally similar
        runs are returned together. It is shorter if there are no more similar runs. If it would have fewer than
        `_FEWEST_ERRORS` errors, it is empty.
        """
        if features not in self._by_distance:
            self._by_distance[features] = self._sort_by_distance(features)
        errors: list[_Error] = []
        last_distance = 0.0
        for distance, other in self._by_distance[features]:
            if len(errors) >= _NUM_NEAREST and distance > last_distance:
                break
            errors += [error for error in self._errors[other] if keep(error)]
            last_distance = distance
        return errors if len(errors) >= _FEWEST_ERRORS else []

    def _sort_by_distance(self, features: ErrorFeatures) -> list[tuple[float, ErrorFeatures]]:
        """Return the features of similar runs with their distances, the nearest first. Equal distances keep the order
        of the errors.
        """
        near: list[tuple[float, int, ErrorFeatures]] = []
        for kind, members in self._features_by_kind.items():
            # Most kinds alone are too far away, so their runs need not be compared one by one.
            if _kind_distance(features.kind, kind) >= _MOST_DISTANCE:
                continue
            for number, other in members:
                distance = _distance(features, other)
                if distance < _MOST_DISTANCE:
                    near.append((distance, number, other))
        near.sort(key=itemgetter(0, 1))
        return [(distance, other) for distance, _, other in near]


@dataclass(frozen=True)
class TimeInterval:
    """Intervals of a predicted time by level, from the errors of similar predictions."""

    measurements: int
    errors: Mapping[float, Interval]

    def seconds(self, predicted: float, level: float) -> tuple[float, float]:
        """Return the smallest and the largest time to expect if `predicted` seconds are predicted, at a level."""
        low, high = self.errors[level]
        return predicted * exp(-high), predicted * exp(-low)


@cache
def load_public_errors() -> PredictionErrors:
    """Return the errors of the published measurements from `errors.csv`."""
    errors: dict[ErrorFeatures, list[_Error]] = defaultdict(list)
    with ERRORS_FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            kind, device, parameters, devices, source, values = (row[name] for name in _COLUMNS)
            kind_words = tuple(kind.split("|"))
            features = ErrorFeatures(kind_words, device, float(parameters), float(devices))
            errors[features] += [_Error(float(value), source) for value in values.split()]
    return PredictionErrors(errors)


def _compute_intervals(errors: list[_Error]) -> dict[float, Interval]:
    """Return one interval per level. The level is the fraction of the errors, by weight, in the interval.

    The n errors of a source have the weight √n together. Above 80% the ends of an interval would depend on single
    errors. An end is therefore at most `_MOST_STRETCH` times as far from the median as the end of the 80% interval.
    """
    num_by_source = Counter(error.source for error in errors)
    weighted = sorted((error.value, num_by_source[error.source] ** -0.5) for error in errors)
    total = sum(weight for _, weight in weighted)
    # Kish's effective number of errors.
    effective = total**2 / sum(weight**2 for _, weight in weighted)
    median = _weighted_quantile(weighted, total / 2)
    intervals: dict[float, Interval] = {}
    for level in LEVELS:
        # With few errors the interval is wider, because they do not show how far others lie out.
        upper = min(1.0, (1 + level) / 2 * (effective + 1) / effective)
        low = _weighted_quantile(weighted, (1 - upper) * total)
        high = _weighted_quantile(weighted, upper * total)
        if level > 0.80:
            usual_low, usual_high = intervals[0.80]
            low = max(low, median + _MOST_STRETCH * (usual_low - median))
            high = min(high, median + _MOST_STRETCH * (usual_high - median))
        intervals[level] = (low, high)
    return intervals


def _weighted_quantile(weighted: list[tuple[float, float]], weight_below: float) -> float:
    """Return the smallest value for which all values up to this value have at least the weight `weight_below`.

    The largest value is returned if the weight of all values is smaller.

    Args:
        weighted: Pairs of value and weight, sorted by value.
        weight_below: Sum of weights.
    """
    remaining = weight_below
    for value, weight in weighted:
        remaining -= weight
        if remaining <= 0:
            return value
    return weighted[-1][0]


def _features_of_residual(item: Residual) -> ErrorFeatures:
    """Return the features of the run that a measurement measured."""
    return _compute_features(item.measured_run.spec, item.measured_run.cluster, item.seconds)


@lru_cache(4096)
def _compute_features(spec: RunSpec, cluster: Cluster, seconds: float | None) -> ErrorFeatures:
    """Return the features of a run on which the error of its prediction depends.

    Args:
        spec: The run.
        cluster: Cluster of the run.
        seconds: Predicted seconds per iteration, or None for a prediction of memory.
    """
    execution, device = cluster.execution, cluster.device
    is_brief = seconds is not None and seconds < _BRIEF_SECONDS
    kind = (
        "time" if seconds else "memory",
        _kind_of_layers(spec),
        device.generation,
        "busy" if _is_busy(spec, cluster, seconds) else "waiting",
        _word_if(is_brief, "brief"),
        "8 bits" if spec.fp8_recipe else "16 bits",
        _word_if(spec.parallelism.context > 1, "context parallel"),
        _word_if(execution.deterministic, "deterministic"),
        _word_if(spec.fused_attention, "fused attention"),
        _word_if(execution.blocking, "blocking"),
        "one node" if cluster.devices <= cluster.per_node else "nodes",
    )
    return ErrorFeatures(
        kind,
        device=name_gpu_kind(device.key),
        parameters=round(log2(total_parameters(spec.shape)), 1),
        devices=round(log2(cluster.devices), 1),
    )


def _word_if(has_property: bool, word: str) -> str:
    """Return the word for a property that a run has, or an empty text if the run does not have the property."""
    return word if has_property else ""


def _kind_of_layers(spec: RunSpec) -> str:
    """Return `experts`, `several kinds` for a model of blocks, `sharded` for sharded dense layers, or `dense`."""
    if spec.shape.experts:
        return "experts"
    if spec.shape.blocks:
        return "several kinds"
    return "sharded" if spec.parallelism.sharding.shards_weights else "dense"


def _is_busy(spec: RunSpec, cluster: Cluster, seconds: float | None) -> bool:
    """Return True if devices are predicted to do more than wait for their host and for one another.

    The result is False for a prediction of memory, and for a device of unknown peak.

    Args:
        spec: The run.
        cluster: Cluster of the run.
        seconds: Predicted seconds per iteration, or None for a prediction of memory.
    """
    peak = cluster.device.peak_flops("bf16") or cluster.device.peak_flops("fp16")
    if not peak or seconds is None:
        return False
    flops = model_flops(spec.shape, spec.batch.global_batch_size)
    return mfu(flops, seconds, cluster.devices, peak) >= _BUSY_MFU


def _distance(features: ErrorFeatures, other: ErrorFeatures) -> float:
    """Return the distance of two runs. The larger it is, the less an error of one run tells about the other.

    The distance is the sum of differences in kind, device, number of parameters and number of devices. 0 means that
    there is no difference.
    """
    device = _DEVICE_DISTANCE if features.device != other.device else 0.0
    doublings = abs(features.parameters - other.parameters) + abs(features.devices - other.devices)
    return _kind_distance(features.kind, other.kind) + device + _DOUBLING_DISTANCE * doublings


@cache
def _kind_distance(kind: tuple[str, ...], other: tuple[str, ...]) -> float:
    """Return the distance of two kinds of runs: 0 for equal kinds, and more the earlier the words are that differ."""
    distance = 0.0
    for index, (word, other_word) in enumerate(zip(reversed(kind), reversed(other), strict=True)):
        if word != other_word:
            distance += _KIND_RATIO**index
    return distance
