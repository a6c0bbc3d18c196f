"""Errors of blind measurements: rows that were predicted before they could influence a formula or a constant."""

from __future__ import annotations

from pathlib import Path

from parakit.planner.readings.residual import Residual, Residuals, compute_residuals
from parakit.planner.readings.summary import (
    TIME,
    ErrorGroup,
    build_groups,
    kind_of_device_and_model,
    metric_kind,
)
from parakit.planner.readings.table import read_measurements

BLIND_FOLDER = Path(__file__).with_name("blind")
"""Files of blind measurements, one per day on which they were predicted."""

_MLPERF = "NVIDIA/NeMo MLPerf"


def predict_blind_measurements() -> Residuals:
    """Predict all blind measurements with the constants of the full fit, which no blind measurement is in."""
    files = [read_measurements(path) for path in sorted(BLIND_FOLDER.glob("*.csv"))]
    measurements = [item for readable, _ in files for item in readable]
    unreadable = [item for _, refusals in files for item in refusals]
    return compute_residuals(measurements, unreadable)


def group_blind_by_kind(residuals: Residuals) -> dict[str, ErrorGroup]:
    """Return the errors of blind measurements by kind of run.

    Kinds that the README's table has have the same names here.
    """
    groups = build_groups(residuals.predicted, _kind_of_blind_run)
    return {group.name: group for group in groups}


def _kind_of_blind_run(item: Residual) -> str:
    """Return the kind of a blind run, by its source, its device and its model."""
    measurement, device = item.measurement, item.measured_run.cluster.device
    if metric_kind(measurement.metric) != TIME:
        return "peak memory"
    if measurement.source.startswith(_MLPERF):
        return "MLPerf, dense"
    if item.measured_run.cluster.execution.document_length:
        return "packed documents"
    if device.generation not in ("hopper", "blackwell"):
        return device.name
    return kind_of_device_and_model(item)
