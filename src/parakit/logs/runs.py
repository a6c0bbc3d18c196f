"""Load run folders and foreign logs as `Run` objects, also incomplete and damaged ones."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec

from parakit.artifacts import run as records
from parakit.artifacts.identity import parse_flag_values
from parakit.artifacts.measurements import TimeRecord
from parakit.artifacts.run import DatasetIdentity, RunRecord, Status, StatusRecord
from parakit.artifacts.verdict import VERIFY_FOLDER, read_verdicts
from parakit.config.files import relative_to_root
from parakit.config.flags import Flags
from parakit.config.run import DeviceKind, RunSpec, flags_from_printed_arguments
from parakit.config.strategy import Parallelism
from parakit.logs.diagnosis import classify_log
from parakit.logs.dialects import canonicalise_arguments
from parakit.logs.iterations import Iteration
from parakit.logs.lines import make_printable
from parakit.logs.pieces import DAMAGED
from parakit.logs.printed import drop_unreadable_values, parse_printed_spec
from parakit.logs.scrape import scrape_runs
from parakit.logs.scraped import ScrapedLog
from parakit.logs.sources import (
    DeviceSamples,
    RankMeasurements,
    log_from_tensorboard,
    read_all_measurements,
    read_samples,
    read_time_ledger,
)
from parakit.logs.stated_model import StatedModel, find_printed_model, find_recorded_model
from parakit.logs.window import Window, select_window

STATUSES_WITH_MEASUREMENTS = (Status.OK, Status.INTERRUPTED, Status.INCOMPLETE, Status.RUNNING)
"""Statuses of runs whose measurements are used, if they have any."""


@dataclass(frozen=True)
class Run:
    """One training run, with everything that its folder or its log states."""

    name: str
    path: Path
    spec: RunSpec | None
    """What was trained; None if a log's arguments define no model."""
    status: StatusRecord
    log: ScrapedLog
    window: Window
    record: RunRecord | None = None
    device: str = ""
    """`cpu`, or the name of the GPU; empty if a log does not state it."""
    megatron: str = ""
    """Version and commit of Megatron; empty if unknown."""
    dataset: DatasetIdentity | None = None
    start_checkpoint: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Megatron's arguments as the log prints them, else as in the command line."""
    samples: DeviceSamples = field(default_factory=DeviceSamples)
    measurements: RankMeasurements = field(default_factory=RankMeasurements)
    notes: tuple[str, ...] = ()
    repeats_name: str = ""
    """Name that the user gave to logs that are repeats of one run; empty otherwise."""
    earlier_iterations: tuple[Iteration, ...] = ()
    """Iterations of the parent run up to the checkpoint from which this run resumed in another strategy.

    They are part of the loss curve, and not of the times."""
    replaced_iterations: tuple[Iteration, ...] = ()
    """Earlier lines of iterations that the run trained again after it resumed."""

    @cached_property
    def time_record(self) -> tuple[TimeRecord | None, str]:
        """Measured times of the ranks with a steady iteration, or None and the reason. Read on first use."""
        return read_time_ledger(self.path)

    @property
    def strategy(self) -> str:
        """Name of the strategy; empty if unknown."""
        return self.spec.name if self.spec else ""

    @property
    def model(self) -> str:
        """Name of the model, or `<layers>x<hidden>` if it has none; empty if unknown."""
        if self.spec is None:
            return ""
        return self.spec.model or f"{self.spec.shape.layers}x{self.spec.shape.hidden}"

    @property
    def model_or_size(self) -> str:
        """Name or size of the model, also if the arguments do not define its parallelism; empty if unknown."""
        sizes = [self.arguments.get(name) for name in ("num_layers", "hidden_size")]
        return self.model or ("x".join(map(str, sizes)) if all(sizes) else "")

    @property
    def dimensions(self) -> str:
        """Layers and hidden size as `36x1280`, also for a model with a name; empty if unknown."""
        if self.spec:
            return f"{self.spec.shape.layers}x{self.spec.shape.hidden}"
        return self.model_or_size

    @cached_property
    def stated_model(self) -> StatedModel:
        """Flags of the model that the run's arguments state."""
        if self.record:
            return find_recorded_model(self.record)
        return find_printed_model(self.arguments)

    @property
    def is_baseline(self) -> bool:
        """True if the run uses no parallelism, so that others can be compared with it."""
        return self.spec is not None and self.spec.parallelism == Parallelism()

    @property
    def is_foreign(self) -> bool:
        """True if the run has no `run.json`: another trainer's log, or a damaged run folder."""
        return self.record is None

    @property
    def global_batch_size(self) -> int | None:
        """Samples per iteration, from the configuration, the lines or the arguments; None if unknown."""
        recorded = self.spec.batch.global_batch_size if self.spec else None
        return (
            recorded
            or self.window.global_batch_size
            or self._read_printed_number("global_batch_size")
        )

    @property
    def seq_length(self) -> int | None:
        """Tokens per sample, also if the arguments define no model; None if unknown."""
        return self.spec.shape.seq_length if self.spec else self._read_printed_number("seq_length")

    @property
    def num_devices(self) -> int | None:
        """Number of devices that trained the run; None if unknown.

        A run on CPU ranks has 1, because its ranks share a machine.
        """
        if self.device == "cpu":
            return 1
        return (
            self.spec.parallelism.world_size
            if self.spec
            else self._read_printed_number("world_size")
        )

    def _read_printed_number(self, name: str) -> int | None:
        """Return a printed argument of a foreign log as a number; None if it is no positive number."""
        text = self.arguments.get(name, "")
        return int(text) if self.is_foreign and re.fullmatch(r"[1-9]\d{0,8}", text) else None

    @property
    def dataset_name(self) -> str | None:
        """Hash of the data set, else its name; None if unknown."""
        return (self.dataset.sha256 or self.dataset.prefix) if self.dataset else None

    @property
    def restarts(self) -> tuple[int, ...]:
        """Number of the first iteration after each restart from a checkpoint."""
        resumed = self.log.iterations[:1] if self.earlier_iterations else ()
        return (*(iteration.iteration for iteration in resumed), *self.log.restarts)

    @property
    def is_running(self) -> bool:
        """True if the run is still training, so that its numbers are preliminary."""
        return self.status.status is Status.RUNNING

    @property
    def has_damaged_file(self) -> bool:
        """True if the run's log is a packed file with wrong bytes, so that its figures may be wrong."""
        return DAMAGED in self.log.notes

    @property
    def has_measurements(self) -> bool:
        """True if the run's measurements are part of the statistics: status and samples allow it."""
        return self.status.status in STATUSES_WITH_MEASUREMENTS and bool(self.window.samples_ms)


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Load run folders and logs.

    Returns:
        All runs, and a sentence for each path that cannot be read.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for path in paths:
        try:
            if path.is_dir() and not records.is_run_folder(path):
                problems.append(describe_folder(path))
            else:
                runs += [load_folder(path)] if path.is_dir() else load_log(path)
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}; it is left out.")
        except Exception as error:
            # A fault in this reader must not stop the report on all other runs.
            fault = f"{type(error).__name__}: {error}"
            problems.append(f"{path} cannot be read ({fault}); it is left out, please report it.")
    return runs, problems


_MAX_LOGS = 5
"""Logs of a folder that a sentence names."""


def describe_folder(folder: Path) -> str:
    """Return a sentence on a folder that is no run folder. It names the logs and runs in this folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    logs = [path for path in files if {".log", ".txt", ".out"} & set(path.suffixes)]
    runs = find_run_folders(folder)
    names = [str(path) for path in [*runs, *logs][:_MAX_LOGS]]
    if not names:
        return f"{folder} is a folder without a log; name a log or a run folder."
    return f"{folder} is a folder and no run; name what is in it: {' '.join(names)}."


def find_run_folders(root: Path) -> list[Path]:
    """Return `root` if it is a run folder; otherwise return the run folders in it, the oldest first.

    The order is that of the names, which begin with the time. Hidden folders belong to the launcher and are left
    out.
    """
    if not root.is_dir():
        return []
    if records.is_run_folder(root):
        return [root]
    folders = sorted(folder for folder in root.iterdir() if not folder.name.startswith("."))
    return list(filter(records.is_run_folder, folders))


_MAX_NAMED_RUNS = 3
"""Newest runs that a sentence names."""


def describe_newest_runs(*roots: Path) -> str:
    """Return a clause that names the newest runs of the first folder that has any, for an error about a wrong run.

    If no folder has a run, the clause names the command that trains some. Folders of the clone are written relative
    to it.
    """
    for root in roots:
        folders = find_run_folders(root)
        if folders:
            newest_names = [folder.name for folder in reversed(folders[-_MAX_NAMED_RUNS:])]
            return f"the newest runs of {relative_to_root(root)} are {', '.join(newest_names)}"
    return f"{relative_to_root(roots[-1])} has no run, and 'make demo' trains six"


def load_folder(folder: Path) -> Run:
    """Load a run folder. Files that are missing or damaged are listed in the run's notes."""
    notes: list[str] = []
    record = _read_file(folder / records.RUN_FILE, records.read_run, notes)
    recorded_status = _read_file(folder / records.STATUS_FILE, records.read_status, notes)
    path = folder / records.LOG_FILE
    log = scrape_runs(path)[-1] if path.is_file() else ScrapedLog(str(path))
    if not log.iterations:
        log = log_from_tensorboard(folder / records.TENSORBOARD_FOLDER, log)
    status = _find_status(folder, recorded_status, record, log)
    ledgers, ledger_notes = read_all_measurements(folder)
    before, replaced = _read_parent(folder, record, notes)
    notes += [*ledger_notes, *log.notes]
    try:
        notes += [verdict.sentence for verdict in read_verdicts(folder)]
    except msgspec.ValidationError as error:
        notes.append(f"a verdict in {VERIFY_FOLDER}/ is not of this version of the kit ({error})")
    run = Run(
        name=folder.name,
        path=folder,
        spec=None,
        status=status,
        log=log,
        window=select_window(log),
        samples=read_samples(folder / records.SAMPLES_FILE),
        measurements=ledgers,
        notes=tuple(notes),
        earlier_iterations=before,
        replaced_iterations=(*replaced, *log.replaced),
    )
    return _add_record(run, record) if record else _add_printed(run)


def _find_status(
    folder: Path, recorded: StatusRecord | None, record: RunRecord | None, log: ScrapedLog
) -> StatusRecord:
    """Return the status of a run folder.

    It is the recorded status, with a reason from the log if the record has none. Without a recorded status, the log
    decides. An incomplete run whose processes look alive is running.

    Args:
        folder: The run folder.
        recorded: Contents of `status.json`; None if the file is missing or damaged.
        record: Contents of `run.json`; None if the file is missing or damaged.
        log: The run's log.
    """
    if recorded is None:
        if (folder / records.LOG_FILE).is_file():
            return classify_log(log)
        return StatusRecord(Status.NO_LOG, None, "No log.txt.")
    if recorded.status is Status.INCOMPLETE and records.looks_alive(folder):
        planned = f" of {record.exit_interval}" if record else ""
        reached = log.iterations[-1].iteration if log.iterations else 0
        return StatusRecord(Status.RUNNING, None, f"iteration {reached}{planned}")
    if recorded.status is not Status.OK and not recorded.reason:
        return replace(recorded, reason=classify_log(log, recorded.exit_code).reason)
    return recorded


def load_log(path: Path) -> list[Run]:
    """Return the runs in a log file without a run folder, in the order of the file.

    If there are several runs, their names end with `#1`, `#2` and so on.
    """
    name, runs = make_printable(path.name), []
    for log in scrape_runs(path):
        part = f"#{log.part}" if log.parts > 1 else ""
        status, window = classify_log(log), select_window(log)
        run = Run(name + part, path, None, status, log, window, notes=log.notes)
        runs.append(_add_printed(run))
    return runs


def _add_record(run: Run, record: RunRecord) -> Run:
    """Return a copy of a run with the facts in its `run.json`: configuration, versions, devices and data."""
    spec, entry = record.spec, record.entry
    on_gpu = spec.device is DeviceKind.GPU and record.host.devices
    batch_size = run.window.global_batch_size
    if batch_size and Flags(record.argv).has("--rampup-batch-size"):
        # The samples have the batch size of most iterations, which need not be the last one.
        spec = replace(spec, batch=replace(spec.batch, global_batch_size=batch_size))
    versions = (entry.megatron_version, (entry.megatron_commit or "")[:12])
    return replace(
        run,
        spec=spec,
        record=record,
        device=record.host.devices[0] if on_gpu else spec.device.value,
        megatron=" ".join(filter(None, versions)),
        dataset=record.dataset,
        start_checkpoint=record.start_checkpoint,
        # Printed arguments have the values that Megatron derived.
        arguments=run.log.arguments or parse_flag_values(record.argv),
    )


def _read_parent(
    folder: Path, record: RunRecord | None, notes: list[str]
) -> tuple[tuple[Iteration, ...], tuple[Iteration, ...]]:
    """Return the iterations of the run from which this run resumed, in two parts.

    The first part ends at the checkpoint, and includes the iterations of earlier parents. The second part is the
    iterations after the checkpoint. Both are empty if the run did not resume from another run, or if the log of
    that run is missing. Remarks on this are added to `notes`.
    """
    if record is None or not record.resumptions:
        return (), ()
    origin = record.resumptions[0]
    # Names begin with the time, so a parent's name comes first. Another name is no parent's.
    if origin.run >= record.run or Path(origin.run).name != origin.run:
        return (), ()
    parent = folder.parent / origin.run
    notes.append(f"resumes from iteration {origin.iteration} of {origin.run}")
    if not (parent / records.LOG_FILE).is_file():
        notes.append(f"{origin.run} is not beside it, so its curve begins there")
        return (), ()
    run = load_folder(parent)
    iterations = (*run.earlier_iterations, *run.log.iterations)
    num_before = bisect_right(iterations, origin.iteration, key=lambda line: line.iteration)
    return iterations[:num_before], iterations[num_before:]


def _add_printed(run: Run) -> Run:
    """Return a run of a foreign log, with the facts that its printed arguments state."""
    arguments, unread = drop_unreadable_values(canonicalise_arguments(run.log.arguments))
    if not arguments:
        return run
    flags = Flags(flags_from_printed_arguments(arguments))
    data = " ".join(flags.texts("--data-path"))
    if not data and flags.has("--mock-data"):
        data = "mock"
    start_checkpoint = None
    if flags.has("--finetune"):
        # Only with --finetune the loaded weights are initial ones. Otherwise the run resumed from its own.
        start_checkpoint = flags.text("--load") or None
    notes = run.notes
    if unread:
        notes += (f"{', '.join(unread)} cannot be read",)
    return replace(
        run,
        spec=parse_printed_spec(arguments, run.window.global_batch_size),
        dataset=DatasetIdentity(data) if data else None,
        start_checkpoint=start_checkpoint,
        arguments=arguments,
        notes=notes,
    )


def _read_file[T](path: Path, read: Callable[[Path], T], notes: list[str]) -> T | None:
    """Read a file of a run folder; return None if the file is missing or of another version of the kit.

    In these cases a sentence is added to `notes`.
    """
    try:
        return read(path.parent)
    except FileNotFoundError:
        notes.append(f"no {path.name}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            schema = json.loads(path.read_bytes()).get("schema")
        except (ValueError, AttributeError):
            schema = None
        schema_note = f", its schema is {schema}" if schema is not None else ""
        notes.append(f"{path.name} is not of this version of the kit ({error}){schema_note}")
    return None
