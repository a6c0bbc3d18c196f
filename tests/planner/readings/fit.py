"""Fit of each generation's constants to published measurements, and errors of measurements left out of the fit.

`Constants` (`src/parakit/planner/time/constants.py`) has a dozen values per generation, each within physical bounds.
All measurements of a generation are fitted together by damped Gauss-Newton steps on the logarithms of predicted over
published times. The weight of a source grows with the root of its number of measurements, and large errors count
less (Huber). Errors that are reported for a source use constants fitted without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from parakit.artifacts.io import write_atomically
from parakit.config.files import read_yaml
from parakit.costs.tensors import UnevenSplitError
from parakit.planner.readings.facts import origin_of_source
from parakit.planner.readings.published import KIT, kit_runs
from parakit.planner.readings.reading_to_spec import MeasuredRun, RefusedError, convert_measurement
from parakit.planner.readings.residual import compute_residual, replace_constants
from parakit.planner.readings.table import PublishedMeasurement, read_measurements
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.constants import CONSTANT_NAMES, CONSTANTS_FILE, Constants
from parakit.planner.time.rates import NoPeakError
from tests.planner.papers import paper_runs

BOUNDS: Mapping[str, tuple[float, float]] = read_yaml(CONSTANTS_FILE)["bounds"]
"""What is physically possible: shares of a datasheet's rate, times between the fastest and the slowest
measured in public."""

FITTED = ("ampere", "hopper", "blackwell")
"""Generations with enough measurements. Other generations use constants of these."""

_METRICS = ("step_time_s", "tokens_per_s_per_gpu", "mfu_percent", "matmul_tflops")
_NOT_FITTED = ("NVIDIA/Megatron-LM golden values", "VIA-Research/vTrain single-node")
"""Megatron's functional tests: deterministic mode, and steps of a few milliseconds that log. vTrain's
small runs: sums of one profile each, no measurements of their own (README.md, "vTrain's small runs")."""
_OWN_WEIGHT = 4
_STEPS, _STEPS_FROM_NEAR = 6, 2
_HUBER = 0.15
_PRIOR = 0.5
"""Strength of the pull of a constant towards its start, in errors per unit of its logarithm."""


@dataclass(frozen=True)
class Fit:
    """Fitted constants, and the number of measurements per source that they were fitted to."""

    generation: str
    constants: Constants
    sources: Mapping[str, int]
    """Number of measurements per source that the constants were fitted to."""


def all_fitted() -> list[MeasuredRun]:
    """Return the published measurements that constants are fitted to, and the runs that the kit reproduces."""
    readings, _ = read_measurements()
    return [*fitted_readings(readings), *kit_runs(), *paper_runs()]


def fitted_readings(readings: Iterable[PublishedMeasurement]) -> list[MeasuredRun]:
    """Return the published measurements that constants are fitted to.

    Times of training, in bits that the formulas know, on devices of a fitted generation; the third that
    is kept back is no part of it.
    """
    measured_runs = []
    for measurement in readings:
        named = measurement.metric in _METRICS and measurement.source not in _NOT_FITTED
        if measurement.is_held_out or not named:
            continue
        try:
            measured_run = convert_measurement(measurement)
        except RefusedError:
            continue
        if measured_run.cluster.device.generation in FITTED and measured_run.spec.lora is None:
            # Settings that a row does not state were taken as 1 when the constants were fitted.
            measured_runs.append(replace(measured_run, unstated=()))
    return measured_runs


def fit(
    readings: Sequence[MeasuredRun],
    generation: str,
    without: str | None = None,
    first: Constants | None = None,
) -> Fit | None:
    """Return the fitted constants of a generation, or None if it has no measurements.

    Args:
        readings: Of all generations.
        generation: The one to fit.
        without: A source that is left out, by its `origin`.
        first: Where the search begins; it ends where it would from anywhere else, sooner.
    """
    of_generation = [
        item
        for item in readings
        if item.cluster.device.generation == generation
        and origin_of_source(item.measurement.source) != without
    ]
    if not of_generation:
        return None
    names = [origin_of_source(item.measurement.source) for item in of_generation]
    sources = Counter(names)
    weights = np.array([_weight(name, sources) for name in names])
    start = start_of(generation)
    free = tuple(name for name in CONSTANT_NAMES if getattr(start, name) > 0)
    values = _minimised(lambda c: _errors(of_generation, c), weights, start, free, first)
    return Fit(generation, values, dict(sources))


def start_of(generation: str) -> Constants:
    """Return the constants that a fit starts from: published figures of kernels and links."""
    return Constants(
        **{n: float(x) for n, x in read_yaml(CONSTANTS_FILE)["start"][generation].items()}
    )


def _weight(source: str, sources: Mapping[str, int]) -> float:
    """Return the weight of a measurement. Runs that the kit reproduces weigh more."""
    return (_OWN_WEIGHT if source == KIT else 1) * float(sources[source] ** -0.5)


def _errors(readings: Sequence[MeasuredRun], constants: Constants) -> NDArray[np.float64]:
    """Return the logarithms of predicted over published times; 0 for runs that cannot be predicted."""
    made: dict[int, Cluster] = {}
    logarithms = []
    for item in readings:
        if id(item.cluster) not in made:
            made[id(item.cluster)] = replace_constants(item.cluster, constants)
        try:
            logarithms.append(
                log(1 + compute_residual(replace(item, cluster=made[id(item.cluster)])).error)
            )
        except (UnevenSplitError, NoPeakError):
            logarithms.append(0.0)
    return np.array(logarithms)


def _minimised(
    errors: Callable[[Constants], NDArray[np.float64]],
    weights: NDArray[np.float64],
    start: Constants,
    free: Sequence[str],
    first: Constants | None,
) -> Constants:
    """Return constants fitted by damped Gauss-Newton steps on their logarithms, clipped to their bounds."""
    low, high = (np.log([max(BOUNDS[name][end], 1e-9) for name in free]) for end in (0, 1))
    start_logs = np.clip(np.log([getattr(start, name) for name in free]), low, high)

    def constants(logs: NDArray[np.float64]) -> Constants:
        changed = dict(zip(free, np.exp(logs).tolist(), strict=True))
        return replace(start, **changed)

    def loss(errors_there: NDArray[np.float64], logs: NDArray[np.float64]) -> float:
        size = np.abs(errors_there)
        huber = np.where(size < _HUBER, errors_there**2 / 2, _HUBER * (size - _HUBER / 2))
        return float(weights @ huber + _PRIOR**2 * np.sum((logs - start_logs) ** 2) / 2)

    logs, damping = start_logs, 1e-3
    if first is not None:
        logs = np.clip(np.log([getattr(first, name) for name in free]), low, high)
    current = errors(constants(logs))
    best = loss(current, logs)
    for _ in range(_STEPS if first is None else _STEPS_FROM_NEAR):
        step = 0.02
        slopes = np.stack(
            [
                (errors(constants(logs + step * unit)) - current) / step
                for unit in np.eye(len(free))
            ],
            axis=1,
        )
        robust = weights * np.minimum(1, _HUBER / np.maximum(np.abs(current), 1e-9))
        square = slopes.T @ (robust[:, None] * slopes) + _PRIOR**2 * np.eye(len(free))
        down = slopes.T @ (robust * current) + _PRIOR**2 * (logs - start_logs)
        before = best
        for _ in range(5):
            move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -down)
            tried = np.clip(logs + np.clip(move, -0.5, 0.5), low, high)
            errors_there = errors(constants(tried))
            there = loss(errors_there, tried)
            if there < best:
                logs, current, best, damping = tried, errors_there, there, damping / 5
                break
            damping *= 10
        if before - best < 1e-4 * before:
            break
    return constants(logs)


def refit(path: Path = CONSTANTS_FILE) -> None:
    """Fit every generation with all sources and without each of them, and write `constants.yaml`."""
    readings = all_fitted()
    data = dict(read_yaml(path))
    data["readings"], data["left_out"] = {}, {}
    for generation in FITTED:
        fitted = fit(readings, generation)
        assert fitted is not None
        data["generations"][generation] = _rounded(fitted.constants)
        data["readings"][generation] = dict(sorted(fitted.sources.items()))
        left_out: dict[str, Any] = {}
        for source in fitted.sources:
            other = fit(readings, generation, source, fitted.constants)
            if other is not None:
                left_out[source] = _rounded(other.constants)
        data["left_out"][generation] = left_out
    ordered = {name: data[name] for name in _PARTS}
    text = yaml.safe_dump(ordered, sort_keys=False, default_flow_style=None, width=110)
    write_atomically(path, _HEAD + text)


_PARTS = ("bounds", "start", "generations", "readings", "left_out")
_HEAD = """# Written by `python -m parakit validate --fit`; constants.py says what each constant is.
# bounds: what is physically possible. start: what is published of such kernels and links, where fits
# start and what holds a constant that no reading decides. generations: fitted, or borrowed. readings:
# how many of each source made them. left_out: without one source, for that source's own errors.
"""


def _rounded(constants: Constants) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in asdict(constants).items()}
