"""`python -m parakit report`: runs and logs to a report folder and the terminal's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts.run import utc_stamp
from parakit.config.files import is_plain_name, relative_to_root
from parakit.config.hardware import Device
from parakit.config.published import load_published
from parakit.formatting.terminal import say
from parakit.formatting.units import plural
from parakit.logs import find_device_in_arguments, find_device_name, find_run_folders, load_runs
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


@dataclass(frozen=True)
class BuildOptions:
    """What a report is made of."""

    name: str | None = None
    paths: tuple[Path, ...] = ()
    """Run folders and logs; empty means every run folder under `runs_root`."""
    repeats: Mapping[Path, str] = field(default_factory=dict)
    """The names of logs that are said to be repeats of one another."""
    runs_root: Path = Path("runs")
    reports_root: Path = Path("reports")
    baseline: Path | None = None
    strict: bool = False
    all_conditions: bool = False
    device: Device | None = None
    """Of foreign logs, which rarely name it."""
    readings: Path | None = None
    """The file of one's own measurements: it corrects predictions, and this report's runs are added."""


def build(options: BuildOptions, console: Console) -> int:
    """Write a report and print it.

    Returns:
        0; 1 if there was no run at all, or a strict comparison found a change; 2 for a wrong name
        or a baseline or folder that cannot be used; 3 if a strict comparison left a time undecided.
    """
    name = options.name or utc_stamp()
    if not is_plain_name(name) or name == "latest":
        console.print(f"'{name}' cannot name a report; use letters, digits, '.', '_' and '-'.")
        return 2
    try:
        finished = finish_report(name, options)
        write_report(finished, options.reports_root / name)
    except BaselineError as error:
        console.print(str(error), markup=False)
        return 2
    except OSError as error:
        place = error.filename or options.reports_root / name
        console.print(f"{place} cannot be written: {error.strerror}.", markup=False)
        return 2
    report = finished.report
    finished.show(console)
    if options.readings:
        for sentence in _add_measurements(
            options.readings, collect_own_measurements(report.entries)
        ):
            say(console, sentence)
    if not can_draw():
        console.print("It has no charts: matplotlib is not installed (pip install matplotlib).")
    # Not wrapped: a path in two lines can be neither clicked nor copied.
    say(console, f"Report: {options.reports_root / name / 'report.html'}")
    if not report.entries:
        return 1
    if options.strict and any(change.fails_strict for change in report.changes):
        return 1
    undecided = any(change.kind == UNDECIDED for change in report.changes)
    return EXIT_UNDECIDED if options.strict and undecided else 0


def finish_report(name: str, options: BuildOptions) -> FinishedReport:
    """Read runs and logs, compare them with one another and with the baseline; write nothing.

    Raises:
        BaselineError: The baseline cannot be read.
    """
    old = read_baseline(options.baseline) if options.baseline else None
    report = _report(name, options)
    if old is not None:
        changes = tuple(compare_with_baseline(old, report.entries))
        report = replace(report, changes=changes, baseline=str(options.baseline))
    return FinishedReport(report)


def _add_measurements(path: Path, measured: OwnMeasurements) -> Iterator[str]:
    """Add rows to the file of one's own measurements; yield what was added, and what was left out."""
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


def _report(name: str, options: BuildOptions) -> Report:
    paths = options.paths or tuple(find_run_folders(options.runs_root))
    runs, problems = load_runs(paths)
    for place, run in enumerate(runs):
        device = run.device
        if run.is_foreign and run.path.is_file():
            # As it was given for all of them, else as the log names it.
            named = options.device.nvml_names[0] if options.device else ""
            device = named or find_device_name(run.path) or find_device_in_arguments(run.arguments)
        runs[place] = replace(run, device=device, repeats_name=options.repeats.get(run.path, ""))
    # Runs that were named are all wanted, whatever versions they were made with.
    all_conditions = options.all_conditions or bool(options.paths)
    report = build_report(name, runs, load_published(), problems, all_conditions)
    try:
        predicted = predict_rows(report.entries, options.runs_root, options.readings)
    except (MeasurementsError, RequestError) as error:
        predicted = ()
        report = replace(report, problems=(*report.problems, str(error)))
    return replace(report, planned=predicted)
