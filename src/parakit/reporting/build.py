"""Build a report from runs and logs, write its folder and print it, for `parakit report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts.run import Status, utc_stamp
from parakit.config.files import is_plain_name, relative_to_root
from parakit.config.hardware import Device
from parakit.config.published import load_published
from parakit.formatting.terminal import say
from parakit.formatting.units import plural
from parakit.logs import (
    Run,
    find_device_in_arguments,
    find_device_name,
    find_run_folders,
    load_runs,
)
from parakit.planner import MeasurementsError, RequestError, add_rows
from parakit.reporting.analyse.earlier import (
    UNDECIDED,
    BaselineError,
    compare_with_baseline,
    read_baseline,
)
from parakit.reporting.analyse.planned import (
    OwnMeasurements,
    collect_own_measurements,
    predict_rows,
)
from parakit.reporting.analyse.report import Report, build_report
from parakit.reporting.canvas import can_draw
from parakit.reporting.render.files import FinishedReport, write_report
from parakit.reporting.render.sentences import join_first_names

EXIT_UNDECIDED = 3
"""Exit code of a strict comparison that leaves a time undecided."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of a report."""

    name: str | None = None
    """Name of the report and its folder; None takes the time."""
    paths: tuple[Path, ...] = ()
    """Run folders and logs; empty takes every run folder under `runs_root`."""
    repeats: Mapping[Path, str] = field(default_factory=dict)
    """Name per log; logs of one name are repeats of one another."""
    runs_root: Path = Path("runs")
    reports_root: Path = Path("reports")
    baseline: Path | None = None
    """Earlier report with which this one is compared; None compares with none."""
    strict: bool = False
    """True makes changes against `baseline` exit codes."""
    all_conditions: bool = False
    """True shows runs under older conditions too."""
    device: Device | None = None
    """Device of foreign logs, which rarely name it; None takes the device that a log names."""
    readings: Path | None = None
    """File of own measurements: it corrects predictions, and the report adds its runs to it."""


def build(options: BuildOptions, console: Console) -> int:
    """Write a report's folder, and print its tables and summary.

    If there is a file of own measurements, the runs of the report are added to it.

    Returns:
        0 if the report was written. 1 if there was no run, or if a strict comparison found a change. 2 for a wrong
        name, or if the baseline or the folder cannot be used. 3 if a strict comparison left a time undecided.
    """
    name = options.name or utc_stamp()
    if not is_plain_name(name) or name == "latest":
        console.print(f"'{name}' cannot name a report; use letters, digits, '.', '_' and '-'.")
        return 2
    try:
        finished = finish_report(name, options)
        if options.paths and _is_empty(finished.report):
            # An empty page would replace the newest report under `latest`.
            for sentence in _describe_empty(finished.report):
                say(console, sentence)
            return 1
        write_report(finished, options.reports_root / name)
    except BaselineError as error:
        console.print(str(error), markup=False)
        return 2
    except OSError as error:
        path = error.filename or options.reports_root / name
        console.print(f"{path} cannot be written: {error.strerror}.", markup=False)
        return 2
    report = finished.report
    finished.show(console)
    if options.readings:
        for sentence in _add_measurements(
            options.readings, collect_own_measurements(report.entries)
        ):
            say(console, sentence)
    if not can_draw():
        console.print(
            "The report has no charts, because matplotlib is not installed (pip install matplotlib)."
        )
    # `say` does not wrap lines: a path in two lines could neither be clicked nor copied.
    say(console, f"Report: {options.reports_root / name / 'report.html'}")
    return _find_exit_code(report, is_strict=options.strict)


def _find_exit_code(report: Report, *, is_strict: bool) -> int:
    """Return the exit code of a written report, as `build` documents it."""
    if not report.entries or (is_strict and any(change.fails_strict for change in report.changes)):
        return 1
    is_undecided = any(change.kind == UNDECIDED for change in report.changes)
    return EXIT_UNDECIDED if is_strict and is_undecided else 0


def _is_empty(report: Report) -> bool:
    """Return True if a report of named paths has no run, or only logs in which nothing could be read."""
    return all(
        entry.run.is_foreign and entry.run.status.status is Status.NO_LOG
        for entry in report.entries
    )


def _describe_empty(report: Report) -> Iterator[str]:
    """Yield why nothing could be reported of each path."""
    yield from report.problems
    yield from (entry.run.status.reason for entry in report.entries)
    yield "No report was written."


def finish_report(name: str, options: BuildOptions) -> FinishedReport:
    """Return a report that compares runs and logs with one another, and with an earlier report if one is named.

    No file is written.

    Raises:
        BaselineError: The baseline cannot be read.
    """
    earlier_rows = read_baseline(options.baseline) if options.baseline else None
    report = _build_report(name, options)
    if earlier_rows is not None:
        changes = tuple(compare_with_baseline(earlier_rows, report.entries))
        report = replace(report, changes=changes, baseline=str(options.baseline))
    return FinishedReport(report)


def _add_measurements(path: Path, measured: OwnMeasurements) -> Iterator[str]:
    """Add rows to the file of own measurements; yield sentences on the added rows, the left-out runs and errors."""
    if measured.rows:
        rows = plural(len(measured.rows), "row")
        try:
            new = add_rows(path, measured.rows)
            yield (
                f"{relative_to_root(path)} has {rows}, {new} of them new: "
                "'make plan' and the next report correct predictions for the same devices by them."
            )
        except MeasurementsError as error:
            yield str(error)
        except OSError as error:
            yield f"{path} cannot be written: {error.strerror}."
    if measured.left_out:
        reasons = [
            f"{join_first_names(names)} ({reason})" for reason, names in measured.left_out.items()
        ]
        yield f"Left out of {relative_to_root(path)}: {'; '.join(reasons)}."


def _build_report(name: str, options: BuildOptions) -> Report:
    """Load the runs and logs and return their report with the planner's predictions."""
    runs, problems = load_runs(options.paths or tuple(find_run_folders(options.runs_root)))
    runs = [_state_device_and_repeats(run, options) for run in runs]
    # Runs that the user named are all shown, whatever versions they were made with.
    all_conditions = options.all_conditions or bool(options.paths)
    report = build_report(name, runs, load_published(), problems, all_conditions)
    try:
        predictions = predict_rows(report.entries, options.runs_root, options.readings)
    except (MeasurementsError, RequestError) as error:
        return replace(report, problems=(*report.problems, str(error)))
    return replace(report, planned=predictions)


def _state_device_and_repeats(run: Run, options: BuildOptions) -> Run:
    """Return a run with its device, and with the name that it shares with its repeats (`repeats_name`).

    The device of a foreign log is taken from the options, or else from the log or its arguments. It is empty if
    none names one.
    """
    device = run.device
    if run.is_foreign and run.path.is_file():
        stated = options.device.nvml_names[0] if options.device else ""
        device = stated or find_device_name(run.path) or find_device_in_arguments(run.arguments)
    return replace(run, device=device, repeats_name=options.repeats.get(run.path, ""))
