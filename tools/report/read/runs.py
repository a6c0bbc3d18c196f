"""Run folders and foreign logs as runs, whatever state they are in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from tools.records import run as records
from tools.records.run import RunRecord, Status, StatusRecord
from tools.report.read.diagnosis import judge
from tools.report.read.ledgers import Ledgers, read_ledgers
from tools.report.read.samples import DeviceSamples, read_samples
from tools.report.read.scrape import scrape_runs
from tools.report.read.scraped import Iteration, ScrapedLog
from tools.report.read.setup import Setup, setup_of_log, setup_of_record
from tools.report.read.tensorboard import log_from_tensorboard
from tools.report.read.window import Window, select_window

COUNTING = (Status.OK, Status.INTERRUPTED, Status.INCOMPLETE)
"""Statuses of runs whose measurements count, if they have any."""


@dataclass(frozen=True)
class Run:
    """One training run with everything that is known of it."""

    name: str
    path: Path
    setup: Setup
    status: StatusRecord
    log: ScrapedLog
    window: Window
    record: RunRecord | None = None
    samples: DeviceSamples = field(default_factory=DeviceSamples)
    ledgers: Ledgers = field(default_factory=Ledgers)
    notes: tuple[str, ...] = ()
    before: tuple[Iteration, ...] = ()
    """Iterations of the run whose checkpoint it went on from in another layout, up to that checkpoint.

    Part of its loss curve, not of its times."""

    @property
    def restarts(self) -> tuple[int, ...]:
        """First iteration after each restart from a checkpoint."""
        own = self.log.iterations[:1] if self.before else ()
        return (*(found.iteration for found in own), *self.log.restarts)

    @property
    def counts(self) -> bool:
        """Whether its measurements are part of the statistics."""
        return self.status.status in COUNTING and bool(self.window.samples_ms)


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Load run folders and logs; what cannot be read becomes a sentence, not an exception."""
    runs: list[Run] = []
    problems: list[str] = []
    for path in paths:
        try:
            if path.is_dir():
                runs.append(load_folder(path))
            else:
                runs += load_log(path)
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}; it is left out.")
    return runs, problems


def find_run_folders(root: Path) -> list[Path]:
    """Folders under `root` that hold a run, oldest first (their names begin with the time)."""
    if not root.is_dir():
        return []
    known = (records.RUN_FILE, records.LOG_FILE, records.STATUS_FILE)
    return sorted(
        folder
        for folder in root.iterdir()
        if folder.is_dir()
        and not folder.name.startswith(".")  # Hidden ones are the launcher's own.
        and any((folder / name).exists() for name in known)
    )


def load_folder(folder: Path) -> Run:
    """Load a run folder; whatever is missing or damaged in it is told in the run's notes."""
    notes: list[str] = []
    record = _read(folder / records.RUN_FILE, records.read_run, notes)
    status = _read(folder / records.STATUS_FILE, records.read_status, notes)
    path = folder / records.LOG_FILE
    log = scrape_runs(path)[-1] if path.is_file() else ScrapedLog(str(path))
    if not log.iterations:
        log = log_from_tensorboard(folder / records.TENSORBOARD_FOLDER, log) or log
    if status is None:
        status = judge(log) if path.is_file() else StatusRecord(Status.NO_LOG, None, "No log.txt.")
    elif status.status is not Status.OK and not status.reason:
        status = replace(status, reason=judge(log, status.exit_code).reason)
    ledgers, ledger_notes = read_ledgers(folder)
    before = _parents_iterations(folder, record, notes)
    return Run(
        name=folder.name,
        path=folder,
        setup=setup_of_record(record, log) if record else setup_of_log(log),
        status=status,
        log=log,
        window=select_window(log),
        record=record,
        samples=read_samples(folder / records.SAMPLES_FILE),
        ledgers=ledgers,
        notes=(*notes, *ledger_notes, *log.notes),
        before=before,
    )


def load_log(path: Path) -> list[Run]:
    """Load a foreign log; one that holds several runs gives several."""
    return [
        Run(
            name=path.name if log.parts == 1 else f"{path.name}#{log.part}",
            path=path,
            setup=setup_of_log(log),
            status=judge(log),
            log=log,
            window=select_window(log),
            notes=log.notes,
        )
        for log in scrape_runs(path)
    ]


def _parents_iterations(
    folder: Path, record: RunRecord | None, notes: list[str]
) -> tuple[Iteration, ...]:
    """What the run that was gone on from had trained by then, its own parents' part included."""
    if record is None or not record.resumptions:
        return ()
    origin = record.resumptions[0]
    # Names begin with the time, so a parent's comes first; anything else is no parent.
    if origin.run >= record.run or Path(origin.run).name != origin.run:
        return ()
    parent = folder.parent / origin.run
    notes.append(f"goes on from iteration {origin.iteration} of {origin.run}")
    if not (parent / records.LOG_FILE).is_file():
        notes.append(f"{origin.run} is not beside it, so its curve begins there")
        return ()
    run = load_folder(parent)
    found = (*run.before, *run.log.iterations)
    return tuple(line for line in found if line.iteration <= origin.iteration)


def _read[T](path: Path, read: Callable[[Path], T], notes: list[str]) -> T | None:
    try:
        return read(path.parent)
    except FileNotFoundError:
        notes.append(f"no {path.name}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        notes.append(f"{path.name} is not of this version of the kit ({error}){_schema(path)}")
    return None


def _schema(path: Path) -> str:
    try:
        found = json.loads(path.read_bytes()).get("schema")
    except (ValueError, AttributeError):
        return ""
    return f", its schema is {found}" if found is not None else ""
