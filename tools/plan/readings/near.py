"""How far readings like a configuration were missed with their own source left out of the fit."""

from __future__ import annotations

from functools import cache
from math import log2
from typing import Any

from tools.plan.readings.express import RefusedError, express
from tools.plan.readings.residual import Residual, left_out, residual
from tools.plan.readings.table import Reading, read_readings
from tools.plan.search import Candidate, Request
from tools.plan.tensors import UnevenSplitError, parameters_total
from tools.plan.time.compute import NoPeakError
from tools.text.units import joined

_LIKE = 8
"""Readings that an interval is made of."""
_FAR = 6.0
"""Doublings, over parameters, devices, TP, PP and sequence together, beyond which nothing is alike."""
_TIMED = ("step_time_s", "tokens_per_s_per_gpu")
_ENOUGH = 3


def near_residuals(request: Request, candidate: Candidate) -> list[tuple[float, Residual]]:
    """The nearest timed readings on the same device with their held-out residuals, nearest first."""
    gpu = request.cluster.device.key.split("-")[0]
    same = (r for r in _readings() if r.metric in _TIMED and r.gpu.lower().split("-")[0] == gpu)
    placed = [(d, r) for r in same if (d := _distance(r, request, candidate)) is not None]
    found: list[tuple[float, Residual]] = []
    for distance, reading in sorted(placed, key=lambda item: (item[0], item[1].line)):
        if distance > _FAR or len(found) == _LIKE:
            break
        try:
            found.append((distance, residual(left_out(express(reading), reading.source))))
        except (RefusedError, UnevenSplitError, NoPeakError):
            continue
    return found


def uncertainty(request: Request, candidate: Candidate) -> str:
    """One sentence: the interval of held-out errors, and the nearest reading; or that there is none."""
    found = near_residuals(request, candidate)
    device = request.cluster.device.name
    if not found:
        return f"No public reading on {device} is near this, so its time has no interval."
    nearest = joined([_measured(item.reading) for _, item in found[:2]])
    if len(found) < _ENOUGH:
        return f"Too few readings are like this for an interval; measured on {device}: {nearest}."
    errors = [item.error for _, item in found]
    return (
        f"Held-out error of {len(found)} readings like this: {_signed(min(errors))}…"
        f"{_signed(max(errors))} (positive: predicted too slow); measured: {nearest}."
    )


def uncertainty_as_data(request: Request, candidate: Candidate) -> dict[str, Any]:
    """The same as data: errors are ratios, `distance` is in doublings."""
    found = near_residuals(request, candidate)
    return {
        "held_out_errors": [item.error for _, item in found],
        "nearest": [
            {"source": i.reading.source, "line": i.reading.line, "distance": d} for d, i in found
        ],
    }


@cache
def _readings() -> tuple[Reading, ...]:
    return read_readings()[0]


def _distance(reading: Reading, request: Request, candidate: Candidate) -> float | None:
    split, shape = candidate.spec.parallelism, candidate.spec.shape
    if reading.params_b is None or reading.gpus is None:
        return None
    pairs = (
        (reading.params_b * 1e9, parameters_total(shape)),
        (reading.gpus, request.cluster.devices),
        (reading.tp or 1, split.tensor),
        (reading.pp or 1, split.pipeline),
        (reading.seq or shape.seq_length, shape.seq_length),
    )
    halves = candidate.spec.dtype in ("fp16", "bf16") and "8" not in reading.dtype
    return sum(abs(log2(one / two)) for one, two in pairs) + (0 if halves else 1)


def _measured(reading: Reading) -> str:
    layout = "".join(f" {n.upper()}{v}" for n in ("tp", "pp", "cp") if (v := getattr(reading, n)))
    unit = "s" if reading.metric == "step_time_s" else "tokens/s a GPU"
    return f"{reading.params_b:g}B, {reading.gpus:,} {reading.gpu},{layout}: {reading.value:,.4g} {unit}"


def _signed(ratio: float) -> str:
    return f"{ratio:+.0%}".replace("-", "−")
