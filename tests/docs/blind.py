"""Errors of measurements that were predicted before they could influence any choice, by kind of run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from parakit.config.files import ROOT
from parakit.planner.readings.residual import Residual, compute_residuals
from parakit.planner.readings.summary import MEMORY, ErrorGroup, metric_kind
from parakit.planner.readings.table import read_measurements

BLIND = ROOT / "src" / "parakit" / "planner" / "readings" / "blind" / "2026-11-28.csv"
"""Nothing is fitted to these rows, and 'make validate' reads them where READINGS= names the file."""


def blind_groups() -> dict[str, ErrorGroup]:
    """Return the errors by kind; kinds of the table in the planner's README have its names."""
    residuals = compute_residuals(*read_measurements(BLIND))
    members: dict[str, list[Residual]] = defaultdict(list)
    for item in residuals.predicted:
        members[_kind(item)].append(item)
    return {kind: _group(kind, items) for kind, items in members.items()}


def _group(kind: str, items: Iterable[Residual]) -> ErrorGroup:
    errors = tuple(item.error for item in items)
    return ErrorGroup(kind, "", len(errors), errors)


def _kind(item: Residual) -> str:
    measurement, spec, device = (
        item.measurement,
        item.measured_run.spec,
        item.measured_run.cluster.device,
    )
    if metric_kind(measurement.metric) == MEMORY:
        return "peak memory"
    if "packed" in measurement.notes:
        return "packed documents"
    if measurement.source.startswith("NVIDIA/NeMo MLPerf"):
        return "MLPerf, dense"
    if device.generation == "hopper":
        return "MoE, H100" if spec.shape.experts else "H100 BF16 recipes"
    return "B200, GB200 dense" if "B200" in device.name else device.name
