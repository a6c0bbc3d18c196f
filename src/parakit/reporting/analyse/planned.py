"""What the planner predicts of each row, with how far such predictions are off; rows as readings."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
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


def predict_rows(
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
    rows = []
    for entry in entries:
        run, device = entry.run, _device(entry.run)
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
    """Runs that the kit trained, as rows of the file of one's own measurements."""

    rows: tuple[MeasurementRow, ...]
    left_out: Mapping[str, Sequence[str]]
    """Names of runs that are in no row although the planner can predict such runs, by the reason."""


def collect_own_measurements(entries: Sequence[Entry]) -> OwnMeasurements:
    """Return a row for each configuration that the kit trained, from the runs whose times are its own.

    Runs that did not end well, that other programs slowed down or whose times scatter widely are left
    out. A configuration that the planner has no form for is skipped without a reason.
    """
    rows: list[MeasurementRow] = []
    left_out: dict[str, list[str]] = defaultdict(list)
    impossible = _find_impossible_rows(entries)
    for entry in entries:
        device = _device(entry.run)
        if entry.run.record is None or device is None or not _has_form(entry):
            continue
        good: list[Run] = []
        row = entry.configuration
        for run in (*row.runs, *row.failed_before, *row.running):
            if reason := _why_no_measurement(run, entry.run.name in impossible):
                left_out[reason].append(run.name)
            else:
                good.append(run)
        time = estimate_pooled_runs(good) if good else None
        if time is None or time.low is None or time.high is None:
            continue
        if (time.high - time.low) / 2 >= _UNSTEADY * time.median:
            left_out["times that scatter widely"] += [run.name for run in good]
            continue
        run, seconds = good[-1], time.median / _MILLISECONDS
        if run.spec is not None and run.record is not None:
            with suppress(RefusedError):
                rows.append(
                    build_measurement_row(run.spec, run.record.argv, device, run.name, seconds)
                )
    return OwnMeasurements(tuple(rows), left_out)


def _why_no_measurement(run: Run, is_impossible: bool) -> str:
    """Return why a run's time is no measurement of its configuration; empty if it is one."""
    if run.status.status is not Status.OK:
        return run.status.status.value.replace("_", " ")
    if run.record is not None and run.record.resumptions:
        return "resumed"
    if why_disturbed(run):
        return "other programs used its cores"
    return "its time beside another's is impossible" if is_impossible else ""


def _find_impossible_rows(entries: Iterable[Entry]) -> set[str]:
    """Return the names of both rows of each impossible ratio of times."""
    names = set()
    for entry in entries:
        if entry.speed and IMPOSSIBLE in entry.speed.caution:
            names |= {entry.run.name, entry.speed.reference}
    return names


_UNSTEADY = 0.25
"""Half of an estimate's interval, of its median, from which on it measured other work on the machine."""


def _is_timed(entry: Entry) -> bool:
    """Whether its time is what its strategy takes on its device: the same for every later run."""
    is_disturbed = why_withheld(entry.configuration) == DISTURBED
    return entry.estimate is not None and not is_disturbed and _has_form(entry)


def _has_form(entry: Entry) -> bool:
    """Return True for a run of the kit or of a log whose time the planner's closed forms are for."""
    spec = entry.run.spec
    return (
        spec is not None
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
