"""Run folders and foreign logs as runs, whatever state they are in."""

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
from parakit.config.flags import Flags
from parakit.config.run import DeviceKind, RunSpec, flags_from_printed_arguments
from parakit.config.strategy import Parallelism
from parakit.logs.diagnosis import classify_log
from parakit.logs.dialects import canonicalise_arguments
from parakit.logs.iterations import Iteration
from parakit.logs.lines import make_printable
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

COUNTING = (Status.OK, Status.INTERRUPTED, Status.INCOMPLETE, Status.RUNNING)
"""Statuses of runs whose measurements count, if they have any."""


@dataclass(frozen=True)
class Run:
    """One training run with everything that is known of it."""

    name: str
    path: Path
    spec: RunSpec | None
    """What was trained; None where a log's arguments define no model."""
    status: StatusRecord
    log: ScrapedLog
    window: Window
    record: RunRecord | None = None
    device: str = ""
    """`cpu`, or the name of the GPU; empty where a log does not say."""
    megatron: str = ""
    """Version and commit."""
    dataset: DatasetIdentity | None = None
    start_checkpoint: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Megatron's arguments: as it printed them, else as they were given."""
    samples: DeviceSamples = field(default_factory=DeviceSamples)
    measurements: RankMeasurements = field(default_factory=RankMeasurements)
    notes: tuple[str, ...] = ()
    repeats_name: str = ""
    """The name under which somebody says that logs are repeats of one another."""
    earlier_iterations: tuple[Iteration, ...] = ()
    """Iterations of the run from whose checkpoint it resumed in another strategy, up to that checkpoint.

    Part of its loss curve, not of its times."""
    replaced_iterations: tuple[Iteration, ...] = ()
    """Iterations that it trained again after it resumed, as they were before."""

    @cached_property
    def time_record(self) -> tuple[TimeRecord | None, str]:
        """Of the ranks that had a steady iteration, read when it is asked for; or why there is none."""
        return read_time_ledger(self.path)

    @property
    def strategy(self) -> str:
        """The strategy's name; empty where it is not known."""
        return self.spec.name if self.spec else ""

    @property
    def model(self) -> str:
        """The model's name, `<layers>x<hidden>` for one that has none; empty where not known."""
        if self.spec is None:
            return ""
        return self.spec.model or f"{self.spec.shape.layers}x{self.spec.shape.hidden}"

    @property
    def model_or_size(self) -> str:
        """The model, also of arguments that leave its layout open; empty where nothing says it."""
        sizes = [self.arguments.get(name) for name in ("num_layers", "hidden_size")]
        return self.model or ("x".join(map(str, sizes)) if all(sizes) else "")

    @property
    def dimensions(self) -> str:
        """Layers and hidden size as `36x1280`, whatever the model is called; empty where not known."""
        if self.spec:
            return f"{self.spec.shape.layers}x{self.spec.shape.hidden}"
        return self.model_or_size

    @cached_property
    def stated_model(self) -> StatedModel:
        """The flags of its model that its arguments state."""
        if self.record:
            return find_recorded_model(self.record)
        return find_printed_model(self.arguments)

    @property
    def is_baseline(self) -> bool:
        """Whether it is split in no way, so that others are compared with it."""
        return self.spec is not None and self.spec.parallelism == Parallelism()

    @property
    def is_foreign(self) -> bool:
        """Whether this kit did not make it, or its `run.json` is lost: a log that was named."""
        return self.record is None

    @property
    def global_batch_size(self) -> int | None:
        """Samples an iteration; the lines of a log name them even where its arguments do not."""
        known = self.spec.batch.global_batch_size if self.spec else None
        return known or self.window.global_batch_size or self._printed("global_batch_size")

    @property
    def seq_length(self) -> int | None:
        """Tokens of a sample; also where the arguments define no model."""
        return self.spec.shape.seq_length if self.spec else self._printed("seq_length")

    @property
    def num_devices(self) -> int | None:
        """Devices that trained it; None where a log does not say. CPU ranks share one machine: 1."""
        if self.device == "cpu":
            return 1
        return self.spec.parallelism.world_size if self.spec else self._printed("world_size")

    def _printed(self, name: str) -> int | None:
        text = self.arguments.get(name, "")
        return int(text) if self.is_foreign and re.fullmatch(r"[1-9]\d{0,8}", text) else None

    @property
    def dataset_name(self) -> str | None:
        """The data set: its hash, else its name."""
        return (self.dataset.sha256 or self.dataset.prefix) if self.dataset else None

    @property
    def restarts(self) -> tuple[int, ...]:
        """First iteration after each restart from a checkpoint."""
        own = self.log.iterations[:1] if self.earlier_iterations else ()
        return (*(found.iteration for found in own), *self.log.restarts)

    @property
    def is_running(self) -> bool:
        """Whether it is still on, so that its figures are those so far."""
        return self.status.status is Status.RUNNING

    @property
    def has_measurements(self) -> bool:
        """Whether its measurements are part of the statistics."""
        return self.status.status in COUNTING and bool(self.window.samples_ms)


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Load run folders and logs; what cannot be read becomes a sentence, not an exception."""
    runs: list[Run] = []
    problems: list[str] = []
    for path in paths:
        try:
            runs += [load_folder(path)] if path.is_dir() else load_log(path)
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}; it is left out.")
        except Exception as error:
            # A fault of the reader's, which must not cost the report of all the others.
            what = f"{type(error).__name__}: {error}"
            problems.append(f"{path} cannot be read ({what}); it is left out, please report it.")
    return runs, problems


def find_run_folders(root: Path) -> list[Path]:
    """The root if it holds a run, else its folders that do, oldest first (names begin with the time)."""
    if not root.is_dir():
        return []
    if records.is_run_folder(root):
        return [root]
    # Hidden ones are the launcher's own.
    folders = sorted(folder for folder in root.iterdir() if not folder.name.startswith("."))
    return list(filter(records.is_run_folder, folders))


def load_folder(folder: Path) -> Run:
    """Load a run folder; the run's notes say what is missing or damaged in it."""
    notes: list[str] = []
    record = _read(folder / records.RUN_FILE, records.read_run, notes)
    status = _read(folder / records.STATUS_FILE, records.read_status, notes)
    path = folder / records.LOG_FILE
    log = scrape_runs(path)[-1] if path.is_file() else ScrapedLog(str(path))
    if not log.iterations:
        log = log_from_tensorboard(folder / records.TENSORBOARD_FOLDER, log)
    if status is None and not path.is_file():
        status = StatusRecord(Status.NO_LOG, None, "No log.txt.")
    elif status is None:
        status = classify_log(log)
    elif status.status is Status.INCOMPLETE and records.looks_alive(folder):
        wanted = f" of {record.exit_interval}" if record else ""
        reached = log.iterations[-1].iteration if log.iterations else 0
        status = StatusRecord(Status.RUNNING, None, f"iteration {reached}{wanted}")
    elif status.status is not Status.OK and not status.reason:
        status = replace(status, reason=classify_log(log, status.exit_code).reason)
    ledgers, ledger_notes = read_all_measurements(folder)
    before, replaced = _before(folder, record, notes)
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


def load_log(path: Path) -> list[Run]:
    """Load a foreign log; one that holds several runs gives several."""
    name, runs = make_printable(path.name), []
    for log in scrape_runs(path):
        part = f"#{log.part}" if log.parts > 1 else ""
        status, window = classify_log(log), select_window(log)
        run = Run(name + part, path, None, status, log, window, notes=log.notes)
        runs.append(_add_printed(run))
    return runs


def _add_record(run: Run, record: RunRecord) -> Run:
    spec, entry = record.spec, record.entry
    on_gpu = spec.device is DeviceKind.GPU and record.host.devices
    reached = run.window.global_batch_size
    if reached and Flags(record.argv).has("--rampup-batch-size"):
        # The figures are of the batch that most iterations trained, which need not be the last.
        spec = replace(spec, batch=replace(spec.batch, global_batch_size=reached))
    versions = (entry.megatron_version, (entry.megatron_commit or "")[:12])
    return replace(
        run,
        spec=spec,
        record=record,
        device=record.host.devices[0] if on_gpu else spec.device.value,
        megatron=" ".join(filter(None, versions)),
        dataset=record.dataset,
        start_checkpoint=record.start_checkpoint,
        # Printed arguments are as Megatron resolved them.
        arguments=run.log.arguments or parse_flag_values(record.argv),
    )


def _before(
    folder: Path, record: RunRecord | None, notes: list[str]
) -> tuple[tuple[Iteration, ...], tuple[Iteration, ...]]:
    """What the run resumed from had trained by then, its own parents' part included; and after it."""
    origin = record.resumptions[0] if record and record.resumptions else None
    # Names begin with the time, so a parent's comes first; anything else is no parent.
    if not origin or not record or origin.run >= record.run or Path(origin.run).name != origin.run:
        return (), ()
    parent = folder.parent / origin.run
    notes.append(f"resumes from iteration {origin.iteration} of {origin.run}")
    if not (parent / records.LOG_FILE).is_file():
        notes.append(f"{origin.run} is not beside it, so its curve begins there")
        return (), ()
    run = load_folder(parent)
    found = (*run.earlier_iterations, *run.log.iterations)
    place = bisect_right(found, origin.iteration, key=lambda line: line.iteration)
    return found[:place], found[place:]


def _add_printed(run: Run) -> Run:
    arguments, unread = drop_unreadable_values(canonicalise_arguments(run.log.arguments))
    if not arguments:
        return run
    flags = Flags(flags_from_printed_arguments(arguments))
    data = flags.text("--data-path") or ("mock" if flags.has("--mock-data") else "")
    return replace(
        run,
        spec=parse_printed_spec(arguments, run.window.global_batch_size),
        dataset=DatasetIdentity(data) if data else None,
        # Weights that were loaded to start from; a resumed run's are its own.
        start_checkpoint=flags.text("--load") or None if flags.has("--finetune") else None,
        arguments=arguments,
        notes=run.notes + ((f"{', '.join(unread)} cannot be read",) if unread else ()),
    )


def _read[T](path: Path, read: Callable[[Path], T], notes: list[str]) -> T | None:
    try:
        return read(path.parent)
    except FileNotFoundError:
        notes.append(f"no {path.name}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            schema = json.loads(path.read_bytes()).get("schema")
        except (ValueError, AttributeError):
            schema = None
        said = f", its schema is {schema}" if schema is not None else ""
        notes.append(f"{path.name} is not of this version of the kit ({error}){said}")
    return None
