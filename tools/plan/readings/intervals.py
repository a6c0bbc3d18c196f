"""Intervals of predictions at a stated level, from the errors of measurements of the same kind.

Each measurement is predicted with constants fitted without its source; its interval is made of the
errors of other layouts alone, so that what it covers is a test. A source counts with the root of its
measurements: figures of one lab have more in common than figures of several.

`intervals.csv` has those of times by kind, as `make validate` wrote them.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path

from tools.plan.readings.residual import Residual
from tools.plan.time.cluster import Cluster
from tools.plan.time.flops import mfu, model_flops
from tools.spec.run import RunSpec

WIDENED = {0.80: 1.05, 0.95: 1.2}
"""Levels, and how much wider than the quantiles: the next lab's scatter is not among the errors."""
INTERVALS = Path(__file__).with_name("intervals.csv")
_BUSY = 0.15
"""Share of the dense 16-bit peak; functional tests and toy models reach less, and miss by more."""
_NAMED = 3
"""Words of a kind that a plan's interval needs, so that they are of one generation of devices."""
_ENOUGH = 20
"""Errors that quantiles are taken of; with fewer a kind is asked for less, its last words first."""


@dataclass(frozen=True)
class _Error:
    value: float
    """Logarithm of predicted over published seconds, or bytes."""
    spec: RunSpec
    source: str


class Intervals:
    """Of any of the residuals that they are made of."""

    def __init__(self, predicted: Iterable[Residual]) -> None:
        self._alike: dict[tuple[object, ...], list[_Error]] = defaultdict(list)
        self._found: dict[tuple[object, ...], dict[float, tuple[float, float]]] = {}
        for item in predicted:
            kind = kind_of_prediction(item)
            error = _Error(log(1 + item.error), item.expressed.spec, item.reading.source)
            for words in range(1, len(kind) + 1):
                self._alike[kind[:words]].append(error)

    def of(self, item: Residual, level: float) -> tuple[float, float]:
        """Least and most that may have been published, in the figure's own unit; what its source leaves
        out may have been anything that fits."""
        low, high = self._errors(item, level)
        if item.seconds is None or item.reading.metric == "step_time_s":
            low, high = -high, -low  # Not a rate: more is slower, or more memory.
        least, most = item.ranged or (item.predicted, item.predicted)
        return least * exp(low), most * exp(high)

    def covers(self, item: Residual, level: float) -> bool:
        """Whether what was published lies inside."""
        low, high = self._errors(item, level)
        return low <= log(1 + item.error) <= high

    def _errors(self, item: Residual, level: float) -> tuple[float, float]:
        kind, spec = kind_of_prediction(item), item.expressed.spec
        if (kind, spec) not in self._found:
            others: list[_Error] = []
            for words in range(len(kind), 0, -1):
                others = [error for error in self._alike[kind[:words]] if error.spec != spec]
                if len(others) >= _ENOUGH:
                    break
            # Of a file of few rows the public ones of the kind say more than it does.
            keys = (_key(kind[:words]) for words in range(len(kind), 0, -1))
            public = next((_table()[key].errors for key in keys if key in _table()), None)
            few = public or dict.fromkeys(WIDENED, (-log(2), log(2)))
            self._found[kind, spec] = _levels(others) if len(others) >= _ENOUGH else few
        return self._found[kind, spec][level]

    def table(self) -> str:
        """`intervals.csv`: of each kind of time with enough errors, their interval at each level."""
        columns = (f"{end}_{level:.2f}" for level in WIDENED for end in ("low", "high"))
        lines = [",".join(("kind", "measurements", *columns))]
        for kind, errors in sorted(self._alike.items(), key=lambda each: _key(each[0])):
            if kind[0] == "time" and len(kind) >= _NAMED and len(errors) >= _ENOUGH:
                ends = (f"{end:.4f}" for both in _levels(errors).values() for end in both)
                lines.append(",".join((_key(kind), str(len(errors)), *ends)))
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Expected:
    """How far times of a kind were missed."""

    measurements: int
    errors: dict[float, tuple[float, float]]
    """Least and largest logarithm of predicted over published, by level."""

    def seconds(self, predicted: float, level: float) -> tuple[float, float]:
        """Least and most that are to be expected."""
        low, high = self.errors[level]
        return predicted * exp(-high), predicted * exp(-low)


def expected(spec: RunSpec, cluster: Cluster, seconds: float) -> Expected | None:
    """Of the predicted time of an iteration; None where too few of its kind were measured."""
    kind, table = _kind(spec, cluster, seconds), _table()
    keys = (_key(kind[:words]) for words in range(len(kind), _NAMED - 1, -1))
    return next((table[key] for key in keys if key in table), None)


@cache
def _table() -> dict[str, Expected]:
    with INTERVALS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    ends = {level: (f"low_{level:.2f}", f"high_{level:.2f}") for level in WIDENED}
    return {
        row["kind"]: Expected(
            int(row["measurements"]),
            {level: (float(row[low]), float(row[high])) for level, (low, high) in ends.items()},
        )
        for row in rows
    }


def _key(kind: tuple[object, ...]) -> str:
    return "|".join(map(str, kind))


def _levels(errors: list[_Error]) -> dict[float, tuple[float, float]]:
    sources = Counter(error.source for error in errors)
    weighed = sorted((error.value, sources[error.source] ** -0.5) for error in errors)
    middle = _quantile(weighed, 0.5)
    # Of few errors the quantiles lie inside the true ones: by split conformal prediction the next of
    # n + 1 is at each rank as likely. With weights, n is Kish's effective number.
    count = sum(weight for _, weight in weighed) ** 2 / sum(weight**2 for _, weight in weighed)
    found = {}
    for level, wider in WIDENED.items():
        inside = (1 + level) / 2 * (count + 1) / count
        low, high = (_quantile(weighed, side) for side in (max(0.0, 1 - inside), min(1.0, inside)))
        found[level] = (middle + wider * (low - middle), middle + wider * (high - middle))
    return found


def kind_of_prediction(item: Residual) -> tuple[object, ...]:
    """What its error depends on, the most telling first."""
    return _kind(item.expressed.spec, item.expressed.cluster, item.seconds)


def _kind(spec: RunSpec, cluster: Cluster, seconds: float | None) -> tuple[object, ...]:
    shape, execution, device = spec.shape, cluster.execution, cluster.device
    layers = "experts" if shape.experts else "several kinds" if shape.blocks else "dense"
    # Devices are busy that are said to do more than wait for their host and for one another.
    peak = device.peak_flops("bf16") or device.peak_flops("fp16")
    flops = model_flops(shape, spec.batch.global_batch_size)
    is_busy = peak and seconds is not None and mfu(flops, seconds, cluster.devices, peak) >= _BUSY
    return (
        "time" if seconds else "memory",
        "sharded" if layers == "dense" and spec.parallelism.sharding.shards_weights else layers,
        device.generation,
        bool(is_busy),
        bool(spec.fp8_recipe),
        execution.deterministic,
        spec.fused_attention,
        execution.blocking,
        cluster.devices <= cluster.per_node,
    )


def _quantile(weighed: list[tuple[float, float]], share: float) -> float:
    """Of values with their weights, in order."""
    rest = share * sum(weight for _, weight in weighed)
    for value, weight in weighed:
        rest -= weight
        if rest <= 0:
            return value
    return weighed[-1][0]
