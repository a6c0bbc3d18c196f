"""Predict each row's time with the planner, and turn rows into own measurements for its corrections.

The planner corrects predictions with published measurements and with the user's own ones. A report adds its
runs to the file of own measurements.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parakit.artifacts.run import Status
from parakit.config.hardware import Device, device_by_key, find_device
from parakit.config.run import Backend, flags_from_printed_arguments
from parakit.logs import Run
from parakit.planner import (
    MeasurementRow,
    RecordedRun,
    RefusedError,
    Uncertainty,
    build_measurement_row,
    predict_recorded_run,
)
from parakit.reporting.analyse.comparability import DISTURBED, IMPOSSIBLE, why_withheld
from parakit.reporting.analyse.configurations import estimate_pooled_runs
from parakit.reporting.analyse.disturbance import why_disturbed
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.statistics import MIN_FOR_INTERVAL, Estimate

_MILLISECONDS = 1e3


@dataclass(frozen=True)
class PlannedEntry:
    """Row of the report with the planner's prediction of its time."""

    entry: Entry
    known: Uncertainty
    """Predicted seconds per iteration, with the error of similar predictions."""

    @property
    def error(self) -> float | None:
        """Relative error of the predicted time, positive if it is too long; None without a measurement."""
        measured = self.entry.time_ms
        return _MILLISECONDS * self.known.seconds / measured - 1 if measured else None


def predict_rows(
    entries: Iterable[Entry], runs_root: Path, own: Path | None
) -> tuple[PlannedEntry, ...]:
    """Return a prediction for each timed row that the planner can predict.

    The planner can predict runs of Megatron on GPUs with known rates, and on CPU ranks if this machine is
    calibrated. The prediction of a row is not corrected by the row's own measurement.

    Args:
        entries: Rows of a report.
        runs_root: Folder of the constants that were measured on this machine.
        own: File of own measurements; None without one.
    """
    rows = []
    for entry in entries:
        run, device = entry.run, _find_device(entry.run)
        if run.spec is None or device is None or not _is_timed(entry):
            continue
        recorded = RecordedRun(
            run.spec,
            device,
            run.record.argv if run.record else flags_from_printed_arguments(run.arguments),
            len(run.record.host.nodes) or 1 if run.record else None,
        )
        known = predict_recorded_run(recorded, runs_root, own)
        if known is not None:
            rows.append(PlannedEntry(entry, known))
    return tuple(rows)


@dataclass(frozen=True)
class OwnMeasurements:
    """Runs of the kit as rows of the file of own measurements."""

    rows: tuple[MeasurementRow, ...]
    left_out: Mapping[str, Sequence[str]]
    """Names of runs that are in no row, by reason. Runs that the planner cannot predict are not listed."""


def collect_own_measurements(entries: Sequence[Entry]) -> OwnMeasurements:
    """Return the measured times of the runs that the kit trained, one row per configuration, and the left-out runs.

    The time of a configuration is the median over its usable runs. The names of runs that are not used are listed
    by reason: the run did not end well, was resumed, was slowed down by other programs, has too few measured
    iterations, or its times scatter widely. Runs that the planner cannot predict, and runs on an unknown device or
    without a record, are listed nowhere.
    """
    measurement_rows: list[MeasurementRow] = []
    left_out: dict[str, list[str]] = defaultdict(list)
    impossible_names = _find_impossible_rows(entries)
    for entry in entries:
        device = _find_device(entry.run)
        if entry.run.record is None or device is None or not _can_planner_predict(entry):
            continue
        usable_runs = []
        is_impossible = entry.run.name in impossible_names
        row = entry.configuration
        for run in (*row.runs, *row.failed_before, *row.running):
            reason = _why_no_measurement(run, is_impossible=is_impossible)
            if reason:
                left_out[reason].append(run.name)
            else:
                usable_runs.append(run)
        if not usable_runs:
            continue
        time = estimate_pooled_runs(usable_runs)
        reason = _why_no_usable_time(time)
        if time is None or reason:
            left_out[reason] += [run.name for run in usable_runs]
            continue
        measurement = _build_row(usable_runs[-1], device, time.median / _MILLISECONDS)
        if measurement is not None:
            measurement_rows.append(measurement)
    return OwnMeasurements(tuple(measurement_rows), left_out)


def _build_row(run: Run, device: Device, seconds: float) -> MeasurementRow | None:
    """Return a run as a row of the measurements file, with its configuration and `seconds` per iteration.

    None means that the run has no record, or that the planner refuses its configuration.
    """
    if run.spec is None or run.record is None:
        return None
    try:
        return build_measurement_row(run.spec, run.record.argv, device, run.name, seconds)
    except RefusedError:
        return None


def _why_no_measurement(run: Run, *, is_impossible: bool) -> str:
    """Return why a run's time must not be used as a measurement; empty if it can be used.

    `is_impossible` is True if the time of the run's row cannot be true next to the time of another row.
    """
    if run.status.status is not Status.OK:
        return run.status.status.value.replace("_", " ")
    if run.record is not None and run.record.resumptions:
        return "resumed"
    if why_disturbed(run):
        return "other programs used its cores"
    if is_impossible:
        return "its time beside another's is impossible"
    return ""


def _why_no_usable_time(time: Estimate | None) -> str:
    """Return why the time of a configuration's runs is no measurement; empty if it is one.

    `time` is None if no run has measured iterations.
    """
    if time is None or time.low is None or time.high is None:
        return f"fewer than {MIN_FOR_INTERVAL} measured iterations"
    half_width = (time.high - time.low) / 2
    if half_width >= _UNSTEADY * time.median:
        return "times that scatter widely"
    return ""


def _find_impossible_rows(entries: Iterable[Entry]) -> set[str]:
    """Return the names of rows whose times have an impossible ratio: both rows of each such pair."""
    names = set()
    for entry in entries:
        if entry.speed and IMPOSSIBLE in entry.speed.caution:
            names |= {entry.run.name, entry.speed.reference}
    return names


_UNSTEADY = 0.25
"""Largest half width of a time's interval, relative to the median, with which the time counts as a measurement.

A run with a wider interval measured other work on the machine, too.
"""


def _is_timed(entry: Entry) -> bool:
    """Return True if the row has a time that no other program disturbed, and the planner can predict it."""
    is_disturbed = why_withheld(entry.configuration) == DISTURBED
    return entry.estimate is not None and not is_disturbed and _can_planner_predict(entry)


def _can_planner_predict(entry: Entry) -> bool:
    """Return True if the planner's formulas cover the row's run.

    The run must be unpatched Megatron with a known micro batch, without a limited link and without ranks that
    share a GPU.
    """
    spec = entry.run.spec
    return (
        spec is not None
        and spec.backend == Backend.MEGATRON
        and spec.batch.micro_batch_size > 0
        and spec.link_bits_per_second is None
        and not spec.shares_gpu
        and spec.patch_file is None
    )


def _find_device(run: Run) -> Device | None:
    """Return the device with its rates; None for an unknown device and for CPU ranks of another machine."""
    if run.device == "cpu":
        is_this_machine = run.record is not None and run.record.host.name == platform.node()
        return device_by_key("cpu") if is_this_machine else None
    return find_device(run.device) if run.device else None
