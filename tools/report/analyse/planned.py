"""What the planner predicts of each row, with how far such predictions are off; rows as readings."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.plan.calibration import calibration_of
from tools.plan.constraints import NEWEST, violations
from tools.plan.readings.local_readings import OwnRuns, Row, own_runs, row_of
from tools.plan.readings.neighbours import Uncertainty, uncertainty
from tools.plan.readings.reading_to_spec import RefusedError, execution_of_flags
from tools.plan.tensors import UnevenSplitError
from tools.plan.time.cluster import Cluster
from tools.plan.time.rates import NoPeakError
from tools.report.analyse.entry import Entry
from tools.report.read.runs import Run
from tools.spec.flags import Flags
from tools.spec.hardware import Device, device_by_key, find_device, link_by_key
from tools.spec.run import Backend, flags_of_printed

_MILLISECONDS = 1e3


@dataclass(frozen=True)
class PlannedEntry:
    """A row's prediction beside its measurement."""

    entry: Entry
    known: Uncertainty

    @property
    def error(self) -> float | None:
        """Of the predicted time, a ratio less 1; None without a measurement."""
        measured = self.entry.time_ms
        return _MILLISECONDS * self.known.seconds / measured - 1 if measured else None


def planned(
    entries: Iterable[Entry], runs_root: Path, own: Path | None
) -> tuple[PlannedEntry, ...]:
    """The rows that the planner can predict, each without its own reading.

    Megatron's on GPUs whose rates are known, and on this machine's CPU ranks once it is calibrated:
    nominal rates of a core predict nothing.

    Args:
        entries: Rows of a report.
        runs_root: Where constants that were measured on this machine are kept.
        own: The file of one's own measurements.
    """
    found = []
    for entry in entries:
        spec, cluster = entry.run.spec, _cluster(entry.run, runs_root)
        # A log can say less than what ran.
        if not spec or not cluster or not _is_timed(entry) or violations(spec, NEWEST):
            continue
        # Of linear attention no time is planned.
        if not spec.shape.vocabulary or spec.shape.linear:
            continue
        known = own_runs(own, cluster).without(spec) if own else OwnRuns()
        with suppress(UnevenSplitError, NoPeakError):
            found.append(PlannedEntry(entry, uncertainty(spec, cluster, known)))
    return tuple(found)


def readings_of(entries: Iterable[Entry]) -> list[Row]:
    """The rows that the kit trained, as one's own measurements; not those whose times scatter widely."""
    rows = []
    for entry in entries:
        run, time, span, device = entry.run, entry.time_ms, entry.interval, _device(entry.run)
        if run.record is None or run.spec is None or time is None or span is None or device is None:
            continue
        unsteady = (span[1] - span[0]) / 2 >= _UNSTEADY * time
        if unsteady or not _is_timed(entry) or run.record.resumptions:
            continue
        with suppress(RefusedError):
            row = row_of(run.spec, run.record.argv, device, run.name, time / _MILLISECONDS)
            rows.append(row)
    return rows


_UNSTEADY = 0.25
"""Half of an estimate's interval, of its median, from which on it measured other work on the machine."""


def _is_timed(entry: Entry) -> bool:
    """Whether its time is what its strategy takes on its device: the same for every later run."""
    spec = entry.run.spec
    return (
        spec is not None
        and entry.estimate is not None
        and spec.backend == Backend.MEGATRON
        and spec.batch.micro_batch_size > 0
        and spec.link_bits_per_second is None
        and not spec.shares_gpu
        and spec.patch_file is None
    )


def _device(run: Run) -> Device | None:
    if run.device == "cpu":
        here = run.record is not None and run.record.host.name == platform.node()
        return device_by_key("cpu") if here else None
    return find_device(run.device) if run.device else None


def _cluster(run: Run, runs_root: Path) -> Cluster | None:
    device, spec = _device(run), run.spec
    if device is None or spec is None:
        return None
    calibration = calibration_of(runs_root, device)
    if device.key == "cpu" and calibration.matmul is None:
        return None
    world = spec.parallelism.world_size
    nodes = len(run.record.host.nodes) or 1 if run.record else -(-world // device.domain)
    flags = run.record.argv if run.record else flags_of_printed(run.arguments)
    return Cluster(
        device,
        world,
        -(-world // nodes),
        link_by_key(device.link),
        link_by_key(device.network),
        calibration,
        execution_of_flags(Flags(flags)),
        # CPU ranks are this machine's (`_device`).
        len(os.sched_getaffinity(0)) if device.key == "cpu" else None,
    )
