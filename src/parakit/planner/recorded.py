"""Prediction of a recorded run, which the report compares with the measurement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parakit.config.flags import Flags
from parakit.config.hardware import Device, link_by_key
from parakit.config.run import RunSpec
from parakit.costs import NEWEST, UnevenSplitError, find_violations
from parakit.planner.calibration import load_device_calibration
from parakit.planner.readings.local_readings import load_own_runs
from parakit.planner.readings.neighbours import Uncertainty, estimate_uncertainty
from parakit.planner.readings.reading_to_spec import parse_execution
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.rates import NoPeakError


@dataclass(frozen=True)
class RecordedRun:
    """Description of a run that was trained, read from its folder or its log."""

    spec: RunSpec
    device: Device
    """Device that each rank ran on. CPU ranks must be those of this machine."""
    flags: Sequence[str]
    """Megatron's arguments."""
    nodes: int | None
    """Machines that it ran on; None if that is not recorded. Each machine then has all devices of a fast domain."""


def predict_recorded_run(
    run: RecordedRun, runs_root: Path, own_measurements: Path | None
) -> Uncertainty | None:
    """Predict the iteration time of a run. Other runs that were measured on this machine correct the prediction.

    Args:
        run: The run.
        runs_root: Folder with the constants that were measured on this machine.
        own_measurements: File of the user's own measurements. The row of this run is not used.

    Returns:
        The prediction and its expected error, or None if the planner cannot predict the run. The planner cannot
        predict a run that a log describes incompletely, or a run with linear attention. It needs a device with a rate
        for the run's dtype. For CPU ranks, it needs a machine that was calibrated.

    Raises:
        MeasurementsError: The file of the user's own measurements is no table.
        RequestError: The constants that were measured here cannot be read.
    """
    spec, cluster = run.spec, _cluster_of(run, runs_root)
    # A log can lack arguments of the run, so that Megatron would refuse the logged arguments alone.
    if cluster is None or find_violations(spec, NEWEST):
        return None
    if not spec.shape.vocabulary or spec.shape.linear:
        return None
    other_runs = load_own_runs(own_measurements, cluster).without(spec)
    try:
        return estimate_uncertainty(spec, cluster, other_runs)
    except (UnevenSplitError, NoPeakError):
        return None


def _cluster_of(run: RecordedRun, runs_root: Path) -> Cluster | None:
    """Return the cluster on which a run was trained, with the constants that were measured on this machine.

    The result is None for CPU ranks without measured constants.
    """
    device, on_cpu = run.device, run.device.key == "cpu"
    calibration = load_device_calibration(runs_root, device)
    if on_cpu and calibration.matmul is None:
        return None
    world = run.spec.parallelism.world_size
    nodes = run.nodes or -(-world // device.domain)
    return Cluster(
        device,
        world,
        -(-world // nodes),
        link_by_key(device.link),
        link_by_key(device.network),
        calibration,
        parse_execution(Flags(run.flags)),
        len(os.sched_getaffinity(0)) if on_cpu else None,
    )
