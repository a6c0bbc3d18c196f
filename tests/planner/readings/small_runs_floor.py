"""Estimate how good a choice among vTrain's small runs can be for any smooth law of a layer's time.

`python -m tests.planner.readings.small_runs_floor`: the 900 times are sums of the times of 32 layers (one per width,
TP and micro batch). A law with a host time, and a device time that grows with the micro batch, is fitted to these 32
times, and strategies are chosen by its result. All other parts of a time stay as published.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median

import numpy as np
from numpy.typing import NDArray

from parakit.planner.readings.residual import Residual, Residuals, compute_residuals
from parakit.planner.readings.summary import evaluate_choices
from parakit.planner.readings.table import PublishedMeasurement, read_measurements

Layer = tuple[int, int, int]
"""Width, TP, micro batch."""
Floats = NDArray[np.float64]
_SMOOTH = 8
"""Exponent that makes the larger of two times a smooth function."""
_TENSOR = (1, 2, 4, 8)


def main() -> None:
    readings = [
        item for item in read_measurements()[0] if item.source.endswith("vTrain single-node")
    ]
    items = compute_residuals(readings).predicted
    layers = layer_seconds(readings)
    _print("the 32 themselves", items, layers, layers)
    _print("host and device by TP", items, layers, fitted(layers, _by_tensor, 16))
    _print("host and device, with log2 of TP", items, layers, fitted(layers, _by_steps, 7))


def layer_seconds(readings: list[PublishedMeasurement]) -> dict[Layer, float]:
    """Return seconds per layer from runs that differ only in layers.

    1F1B passes n + p - 1 times through L / p layers.
    """
    times: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for measurement in readings:
        assert measurement.hidden
        assert measurement.layers
        times[measurement.hidden, *_split(measurement)][measurement.layers] = measurement.value
    estimates = defaultdict(list)
    for (hidden, tensor, pipeline, data, micro, samples), by_layers in times.items():
        depths = sorted(by_layers)
        passes = samples // data // micro + pipeline - 1
        for few, many in pairwise(depths):
            seconds = (by_layers[many] - by_layers[few]) / ((many - few) / pipeline * passes)
            estimates[hidden, tensor, micro].append(seconds)
    return {layer: median(values) for layer, values in sorted(estimates.items())}


def fitted(
    layers: dict[Layer, float], law: Callable[[Floats, Layer], float], parameters: int
) -> dict[Layer, float]:
    """Return the times of a law whose parameters minimise the squared logarithms of its errors."""
    wanted = np.log(list(layers.values()))

    def errors(logs: Floats) -> Floats:
        return np.log([law(np.exp(logs), layer) for layer in layers]) - wanted

    logs, damping = np.full(parameters, np.log(1e-3)), 1e-2
    current = errors(logs)
    for _ in range(300):
        slopes = np.stack(
            [(errors(logs + 1e-4 * u) - current) / 1e-4 for u in np.eye(parameters)], 1
        )
        square = slopes.T @ slopes + damping * np.eye(parameters)
        tried = logs - np.linalg.solve(square, slopes.T @ current)
        there = errors(tried)
        better = there @ there < current @ current
        logs, current = (tried, there) if better else (logs, current)
        damping *= 1 / 3 if better else 4
    return {layer: law(np.exp(logs), layer) for layer in layers}


def _by_tensor(values: Floats, layer: Layer) -> float:
    """Return seconds of a layer from four host times, four idle device times and eight times per sample."""
    hidden, tensor, micro = layer
    at = _TENSOR.index(tensor)
    device = values[4 + at] + values[8 + 4 * (hidden > 1024) + at] * micro
    return _larger(values[at], device)


def _by_steps(values: Floats, layer: Layer) -> float:
    """Return seconds of a layer: host and device have a fixed time and a time per doubling of TP.

    The time per sample shrinks with TP to a constant.
    """
    hidden, tensor, micro = layer
    steps = _TENSOR.index(tensor)
    sample = values[4 + (hidden > 1024)] * (1 / tensor + 1e3 * values[6] * (tensor > 1))
    return _larger(values[0] + values[1] * steps, values[2] + values[3] * steps + sample * micro)


def _larger(first: float, second: float) -> float:
    return float((first**_SMOOTH + second**_SMOOTH) ** (1 / _SMOOTH))


def _split(measurement: PublishedMeasurement) -> tuple[int, int, int, int, int]:
    degrees = (measurement.tp, measurement.pp, measurement.dp, measurement.mbs, measurement.gbs)
    tensor, pipeline, data, micro, samples = (value or 1 for value in degrees)
    return tensor, pipeline, data, micro, samples


def _print(
    name: str, items: tuple[Residual, ...], measured: dict[Layer, float], law: dict[Layer, float]
) -> None:
    changed = []
    for item in items:
        measurement = item.measurement
        tensor, pipeline, data, micro, samples = _split(measurement)
        layer = (measurement.hidden or 0, tensor, micro)
        passes = samples // data // micro + pipeline - 1
        moved = (law[layer] - measured[layer]) * (measurement.layers or 0) / pipeline * passes
        seconds = measurement.value + moved
        changed.append(replace(item, seconds=seconds, error=seconds / measurement.value - 1))
    lost = [choice.regret for choice in evaluate_choices(Residuals(tuple(changed), ()))]
    off = [abs(law[layer] / measured[layer] - 1) for layer in measured]
    print(
        f"{name}: layers {mean(off):.1%} off in the mean, {max(off):.0%} at most; "
        f"{len(lost)} choices lose {mean(lost):.1%} in the mean, {max(lost):.0%} at worst"
    )


if __name__ == "__main__":
    main()
