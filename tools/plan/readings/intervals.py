"""Intervals of predictions at a stated level, from the errors of measurements of the same kind.

Each measurement is predicted with constants fitted without its source; its interval is made of the
errors of other layouts alone, so that what it covers is a test. A source counts with the root of its
measurements: figures of one lab have more in common than figures of several.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log

from tools.plan.readings.residual import Residual
from tools.spec.run import RunSpec

WIDENED = {0.80: 1.15, 0.95: 1.2}
"""Levels, and how much wider than the quantiles: those of few dozens of errors lie inside the true ones,
and the next lab's scatter is not among them."""
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
        """Least and most that may have been published, in the figure's own unit."""
        low, high = self._errors(item, level)
        if item.seconds is not None and item.reading.metric != "step_time_s":
            return item.predicted * exp(low), item.predicted * exp(high)  # A rate: more is faster.
        return item.predicted * exp(-high), item.predicted * exp(-low)

    def covers(self, item: Residual, level: float) -> bool:
        """Whether what was published lies inside."""
        low, high = self._errors(item, level)
        return low <= log(1 + item.error) <= high

    def _errors(self, item: Residual, level: float) -> tuple[float, float]:
        kind, spec = kind_of_prediction(item), item.expressed.spec
        if (kind, spec) not in self._found:
            self._found[kind, spec] = self._quantiles(kind, spec)
        return self._found[kind, spec][level]

    def _quantiles(
        self, kind: tuple[object, ...], spec: RunSpec
    ) -> dict[float, tuple[float, float]]:
        others: list[_Error] = []
        for words in range(len(kind), 0, -1):
            others = [error for error in self._alike[kind[:words]] if error.spec != spec]
            if len(others) >= _ENOUGH:
                break
        if not others:
            return dict.fromkeys(WIDENED, (-log(2), log(2)))
        sources = Counter(error.source for error in others)
        weighed = sorted((error.value, sources[error.source] ** -0.5) for error in others)
        middle = _quantile(weighed, 0.5)
        found = {}
        for level, wider in WIDENED.items():
            low, high = (_quantile(weighed, side) for side in ((1 - level) / 2, (1 + level) / 2))
            found[level] = (middle + wider * (low - middle), middle + wider * (high - middle))
        return found


def kind_of_prediction(item: Residual) -> tuple[object, ...]:
    """What its error depends on, the most telling first."""
    spec, cluster = item.expressed.spec, item.expressed.cluster
    shape, execution = spec.shape, cluster.execution
    layers = "experts" if shape.experts else "several kinds" if shape.blocks else "dense"
    return (
        "time" if "memory" not in item.reading.metric else "memory",
        "sharded" if layers == "dense" and spec.parallelism.sharding.shards_weights else layers,
        cluster.device.generation,
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
