"""The constants of each generation, fitted to readings; and the errors of readings left out of the fit.

`Constants` (`tools/plan/time/constants.py`) has a dozen for a generation, each within its physical bounds.
All readings of a generation are fitted together, a source's weight growing with the root of its readings,
by damped Gauss-Newton steps on the logarithms of predicted over published times, large errors counted
less (Huber). What is reported for a source is predicted with constants fitted without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log

import numpy as np
from numpy.typing import NDArray

from tools.plan.readings.express import Expressed, RefusedError, express
from tools.plan.readings.residual import residual
from tools.plan.readings.table import Reading
from tools.plan.tensors import UnevenSplitError
from tools.plan.time.cluster import Calibration, Cluster
from tools.plan.time.compute import NoPeakError
from tools.plan.time.constants import BOUNDS, NAMES, Constants, constants_of

FITTED = ("ampere", "hopper", "blackwell")
"""Generations with readings enough; the others borrow."""

_METRICS = ("step_time_s", "tokens_per_s_per_gpu", "mfu_percent", "matmul_tflops")
_EVERY = 5
"""Of a source with many readings of a few small models only every so many are fitted: a frozen split."""
_MANY = 200
_STEPS = 8
_HUBER = 0.15
_PRIOR = 0.15
"""How strongly a constant is held at its start: a share of one reading's weight a unit of its logarithm."""


@dataclass(frozen=True)
class Fit:
    """What was fitted, and to what."""

    generation: str
    constants: Constants
    sources: Mapping[str, int]
    """Readings of each source that made it."""


def fitted_readings(readings: Iterable[Reading]) -> list[Expressed]:
    """The named part of the readings that constants are fitted to.

    Times of training, in bits that the formulas know, on devices of a fitted generation. Megatron's
    functional tests are left out: deterministic mode, and steps of a few milliseconds that log.
    """
    counts = Counter(reading.source for reading in readings)
    seen: Counter[str] = Counter()
    found = []
    for reading in readings:
        if reading.metric not in _METRICS or "golden" in reading.source:
            continue
        seen[reading.source] += 1
        if counts[reading.source] > _MANY and "vTrain" in reading.source and seen[reading.source] % _EVERY:
            continue
        try:
            expressed = express(reading)
        except RefusedError:
            continue
        if expressed.cluster.device.generation in FITTED and not expressed.cluster.execution.frozen:
            found.append(expressed)
    return found


def fit(
    readings: Sequence[Expressed], generation: str, without: str | None = None
) -> Fit | None:
    """Constants of a generation; None where no reading is left.

    Args:
        readings: Of all generations.
        generation: The one to fit.
        without: A source that is left out.
    """
    own = [
        item
        for item in readings
        if item.cluster.device.generation == generation and item.reading.source != without
    ]
    if not own:
        return None
    sources = Counter(item.reading.source for item in own)
    weights = np.array([sources[item.reading.source] ** -0.5 for item in own])
    start = constants_of(generation)
    free = tuple(name for name in NAMES if getattr(start, name) > 0)
    values = _minimised(lambda c: _errors(own, c), weights, start, free)
    return Fit(generation, values, dict(sources))


def with_constants(constants: Constants) -> Callable[[Cluster], Cluster]:
    """A cluster with these constants in place of its generation's."""
    calibration = Calibration(**asdict(constants))
    made: dict[int, Cluster] = {}

    def adjusted(cluster: Cluster) -> Cluster:
        if id(cluster) not in made:
            made[id(cluster)] = replace(cluster, calibration=calibration)
        return made[id(cluster)]

    return adjusted


def _errors(readings: Sequence[Expressed], constants: Constants) -> NDArray[np.float64]:
    """Logarithms of predicted over published times; 0 for what cannot be predicted."""
    adjust = with_constants(constants)
    found = []
    for item in readings:
        try:
            found.append(log(1 + residual(item, None, adjust).error))
        except (UnevenSplitError, NoPeakError):
            found.append(0.0)
    return np.array(found)


def _minimised(
    errors: Callable[[Constants], NDArray[np.float64]],
    weights: NDArray[np.float64],
    start: Constants,
    free: Sequence[str],
) -> Constants:
    """Damped Gauss-Newton on logarithms of the constants, clipped to their bounds."""
    low, high = (np.log([max(BOUNDS[name][end], 1e-9) for name in free]) for end in (0, 1))
    origin = np.clip(np.log([getattr(start, name) for name in free]), low, high)

    def constants(logs: NDArray[np.float64]) -> Constants:
        changed = dict(zip(free, np.exp(logs).tolist(), strict=True))
        return replace(start, **changed)

    def loss(found: NDArray[np.float64], logs: NDArray[np.float64]) -> float:
        size = np.abs(found)
        huber = np.where(size < _HUBER, found**2 / 2, _HUBER * (size - _HUBER / 2))
        return float(weights @ huber + _PRIOR**2 * np.sum((logs - origin) ** 2) / 2)

    logs, damping = origin, 1e-3
    found = errors(constants(logs))
    best = loss(found, logs)
    for _ in range(_STEPS):
        step = 0.02
        slopes = np.stack(
            [
                (errors(constants(logs + step * unit)) - found) / step
                for unit in np.eye(len(free))
            ],
            axis=1,
        )
        robust = weights * np.minimum(1, _HUBER / np.maximum(np.abs(found), 1e-9))
        square = slopes.T @ (robust[:, None] * slopes) + _PRIOR**2 * np.eye(len(free))
        down = slopes.T @ (robust * found) + _PRIOR**2 * (logs - origin)
        before = best
        for _ in range(5):
            move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -down)
            tried = np.clip(logs + np.clip(move, -0.5, 0.5), low, high)
            errors_there = errors(constants(tried))
            there = loss(errors_there, tried)
            if there < best:
                logs, found, best, damping = tried, errors_there, there, damping / 5
                break
            damping *= 10
        if before - best < 1e-4 * before:
            break
    return constants(logs)
