"""The run folder `runs/<UTC time>-<strategy>-<model>-<N><gpu|cpu>/`: its files and their records."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from parakit.artifacts.io import lock_file, write_record
from parakit.config import variables
from parakit.config.files import read_regular_file
from parakit.config.flags import count_end_of_document_in_vocabulary
from parakit.config.run import DeviceKind, PatchFile, RunSpec, spec_from_flags
from parakit.config.strategy import Batch, Parallelism

RUN_FILE = "run.json"
STATUS_FILE = "status.json"
COMMAND_FILE = "command.sh"
LOG_FILE = "log.txt"
SAMPLES_FILE = "samples.csv"
COMMUNICATION_FILE = "comm.json"
MEMORY_FILE = "memory.json"
TIME_FILE = "time.json"
TRACE_FILE = "trace.json"
ROUTING_FILE = "routing.json"
JOB_FILE = "job.json"
LAUNCHER_FILE = "launcher.json"
LEDGER_FOLDER = "ledger"
"""Each rank's own ledger while it runs; the five files above are gathered from it."""
STACKS_FOLDER = "stacks"
"""Where each rank was when a hang was noticed, `rank<N>.txt`, and its last calls, `rank<N>.pkl`."""
CALLS_SUFFIX = ".pkl"
STACKS_SIGNAL = signal.SIGRTMIN + 3
"""Asks a rank for both. LLVM, by which Triton compiles, takes SIGUSR1 and SIGUSR2 for itself
(its `lib/Support/Unix/Signals.inc`)."""
STOPPED_FILE = "stopped.txt"
"""In the same folder, the ranks that a signal had stopped; absent if none was."""
CHECKPOINTS_FOLDER = "checkpoints"
ATTEMPTS_FOLDER = "attempts"
"""What earlier attempts of a resumed run left, `1/`, `2/`, …; log, events and checkpoints continue."""
NODES_FOLDER = "nodes"
"""A folder for each node but 0.

Megatron's last rank prints the iterations, and it lives on the last node: each node's ranks write
`nodes/<n>/log.txt`, and node 0 adds what is new there to its own `log.txt` as it comes.
"""
TENSORBOARD_FOLDER = "tensorboard"

ALIVE_SECONDS = 15.0
"""A run's sampler writes every second; on a network file system it shows some seconds later."""


def utc_now() -> str:
    """The present time, ISO 8601, seconds, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def utc_stamp() -> str:
    """The same as folders are named by."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


class Status(StrEnum):
    """How a run ended."""

    OK = "ok"
    OUT_OF_MEMORY = "oom"
    NAN = "nan"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    INCOMPLETE = "incomplete"
    NO_LOG = "no_log"
    RUNNING = "running"
    """Never in a file: what `looks_alive` finds of a run whose file says `incomplete`."""


@dataclass(frozen=True)
class DatasetIdentity:
    """The data set of a run."""

    prefix: str
    sha256: str | None = None
    """Of the `.bin` file, as recorded when the data set was made."""


@dataclass(frozen=True)
class MegatronEntry:
    """The program that trained: where it came from and which Megatron it ran."""

    path: str
    megatron_version: str
    megatron_commit: str | None = None


@dataclass(frozen=True)
class CodeHashes:
    """Hashes of the files that trained, as they were on the disk, whatever a repository says of them."""

    kit: str
    megatron: str | None = None
    """None where it is in an image, whose digest says which, or where another backend trained."""

    def __str__(self) -> str:
        return f"kit {self.kit}" + (f", Megatron {self.megatron}" if self.megatron else "")

    def joined(self, later: CodeHashes) -> CodeHashes:
        """Of a run that was resumed: what trained first, then what trained on, where they differ."""

        def join(one: str | None, two: str | None) -> str | None:
            return one if one == two else f"{one or 'none'}+{two or 'none'}"

        return CodeHashes(
            join(self.kit, later.kit) or self.kit, join(self.megatron, later.megatron)
        )


@dataclass(frozen=True)
class DeviceLink:
    """How the GPUs of two ranks are connected; None is what the driver does not report."""

    first: int
    second: int
    topology: str | None = None
    """Their nearest common ancestor, such as `one PCIe switch`."""
    nvlinks: int | None = None
    """Active NVLinks between them, directly or over a switch; 0 is none."""
    peer_access: bool | None = None
    """Whether one reads the other's memory directly."""


@dataclass(frozen=True)
class HostRecord:
    """The machine or machines of a run."""

    name: str
    cpu: str
    cores: int
    memory_bytes: int
    devices: tuple[str, ...] = ()
    """One name a rank; CPU ranks carry the processor's name."""
    driver: str | None = None
    interconnect: str | None = None
    links: tuple[DeviceLink, ...] = ()
    """One for each pair of GPUs of a node."""
    nodes: tuple[str, ...] = ()
    """Names of all machines, node 0 first, where there were several."""


@dataclass(frozen=True)
class Resumption:
    """The checkpoint that a run was resumed from."""

    run: str
    """The run folder whose checkpoint was loaded: its own, or its parent's where the strategy
    changed."""
    iteration: int
    """Of the checkpoint; the first iteration trained is the next one."""


@dataclass(frozen=True)
class RunRecord:
    """`run.json`: what was asked, and where it ran."""

    run: str
    created_utc: str
    spec: RunSpec
    """In the file its fields are on the level of the others; see `encode_run`."""
    exit_interval: int
    """Iterations asked for: Megatron's `--exit-interval`."""
    argv: tuple[str, ...]
    """Megatron's arguments, without program and entry."""
    command: tuple[str, ...]
    environment: dict[str, str]
    """What the kit set beyond the caller's environment; never a secret."""
    entry: MegatronEntry
    host: HostRecord
    software: dict[str, str]
    dataset: DatasetIdentity | None = None
    start_checkpoint: str | None = None
    """Identity of the shared starting weights; runs are comparable in loss only if it is equal."""
    start_weights: str | None = None
    """Hash of those weights; a checkpoint that is written anew from the same seed has the same."""
    kit_commit: str | None = None
    code: CodeHashes | None = None
    """None in records of before it was kept."""
    runtime: str = "host"
    """`docker` or `host`."""
    image: str | None = None
    """The container's image and its digest, `name@sha256:…`."""
    save_every: int | None = None
    """Iterations between checkpoints; None: none are saved."""
    resumptions: tuple[Resumption, ...] = ()
    """In order; empty for a run that was never resumed."""
    schema: int = 1


HANG_REASON_PREFIX = "Hang: "
"""So begins the reason of a run that the launcher ended because nothing was logged any more."""


@dataclass(frozen=True)
class StatusRecord:
    """`status.json`: how the run ended and why."""

    status: Status
    exit_code: int | None = None
    reason: str = ""
    rank: int | None = None
    """The rank that failed first, where the log names it."""
    finished_utc: str | None = None
    wall_seconds: float | None = None


@dataclass(frozen=True)
class LauncherRecord:
    """`launcher.json`: the process that trains the run, or did last; `make stop` ends it."""

    host: str
    process: int
    started: float
    """By the host's clock, seconds since 1970: another process may have the number by now."""


@dataclass(frozen=True)
class JobRecord:
    """`job.json`: the Slurm job that trains, or waits to."""

    job_id: str
    """Of an array's element as Slurm writes it, `12_0`."""
    nodes: int
    submitted_utc: str
    image: str | None = None
    """The container's image that was asked for, taken where the site has Pyxis; None is the host."""
    submitted: dict[str, Any] | None = None
    """`run.json` as composed where the run was submitted. Nodes compose it anew, with the Megatron, the
    fused kernels and the checkpoints that they find, so the file may change later."""


SAMPLE_COLUMNS = (
    "seconds",
    "rank",
    "device",
    "utilisation_percent",
    "memory_bytes",
    "power_watts",
    "temperature_celsius",
    "sm_clock_mhz",
    "throttle_reasons",
)
"""Columns of `samples.csv`; what a device does not tell is empty."""


def is_run_folder(folder: Path) -> bool:
    """Whether it holds a run, or what is left of one."""
    known = (RUN_FILE, LOG_FILE, STATUS_FILE)
    return folder.is_dir() and any((folder / name).exists() for name in known)


def encode_run(record: RunRecord) -> dict[str, Any]:
    """The content of `run.json`.

    What `argv` and `environment` say (shape, recomputation, optimizer, fused patches) is not repeated.
    """
    spec = record.spec
    known = msgspec.to_builtins(spec) | {"strategy": spec.name, "seq_length": spec.shape.seq_length}
    # One by one: msgspec leaves out defaults that it filled in itself, of a file of before they were.
    known |= {each.name: msgspec.to_builtins(getattr(record, each.name)) for each in fields(record)}
    return {name: known[name] for name in _NAMES}


_RENAMED = {"plant": "patch_file"}
"""Fields of `run.json` as older versions named them."""


def decode_run(data: Mapping[str, Any]) -> RunRecord:
    """The record of what `encode_run` gave.

    Raises:
        msgspec.ValidationError: It is not of this shape, or its arguments define no model.
    """
    data = {_RENAMED.get(name, name): value for name, value in data.items()}
    said = msgspec.convert(data, _Said)
    try:
        argv = count_end_of_document_in_vocabulary(said.argv, said.entry.megatron_version)
        spec = spec_from_flags(argv, said.parallelism.world_size, said.device, said.model)
    except (ValueError, ZeroDivisionError) as error:
        raise msgspec.ValidationError(str(error)) from None
    fused = tuple(filter(None, said.environment.get(variables.FUSED, "").split(",")))
    in_spec = {field.name for field in fields(RunSpec)}.intersection(said.__struct_fields__)
    spec = replace(spec, fused=fused, **{name: getattr(said, name) for name in in_spec})
    return msgspec.convert(data | {"spec": msgspec.to_builtins(spec)}, RunRecord)


_NAMES = (
    *("run", "created_utc", "backend", "strategy", "model", "device", "parallelism", "batch"),
    *("seq_length", "dtype", "dropout", "seed", "exit_interval", "argv", "command", "environment"),
    *("entry", "host", "software", "dataset", "start_checkpoint", "start_weights", "kit_commit"),
    *("code", "runtime", "image", "link_bits_per_second", "save_every", "resumptions"),
    *("shares_gpu", "patch_file", "schema"),
)
"""Fields of `run.json`, in their order."""


class _Said(msgspec.Struct, kw_only=True):
    """What of the spec is among them, and what its other fields are read from."""

    backend: str
    strategy: str
    model: str
    device: DeviceKind
    parallelism: Parallelism
    batch: Batch
    dtype: str
    dropout: float
    seed: int
    argv: tuple[str, ...]
    environment: dict[str, str]
    entry: MegatronEntry
    link_bits_per_second: int | None = None
    shares_gpu: bool = False
    patch_file: PatchFile | None = None


def read_run(folder: Path) -> RunRecord:
    """Read `run.json`.

    Raises:
        FileNotFoundError: The folder has no `run.json`.
        OSError: `run.json` cannot be read, or is no regular file.
        msgspec.DecodeError: The file is not JSON of this shape.
    """
    return decode_run(
        msgspec.json.decode(read_regular_file(folder / RUN_FILE), type=dict[str, Any])
    )


def write_run(folder: Path, record: RunRecord) -> None:
    """Write `run.json`, whole or not at all."""
    write_record(folder / RUN_FILE, encode_run(record))


def read_status(folder: Path) -> StatusRecord:
    """Read `status.json`; raises as `read_run` does."""
    return msgspec.json.decode(read_regular_file(folder / STATUS_FILE), type=StatusRecord)


def is_running(log: Path) -> bool:
    """Whether a process of the run that writes this log still lives: all of them share its lock."""
    try:
        with log.open("rb") as file:
            lock_file(file, shared=True)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def looks_alive(folder: Path) -> bool:
    """Whether a run is still on: a process here holds its log, or samples of any machine are fresh."""
    try:
        return is_running(folder / LOG_FILE) or _sampled_lately(folder)
    except OSError:  # Another user's, or no folder at all.
        return False


def _sampled_lately(folder: Path) -> bool:
    for place in (folder, *(folder / NODES_FOLDER).glob("*")):
        try:
            if time.time() - (place / SAMPLES_FILE).stat().st_mtime < ALIVE_SECONDS:
                return True
        except OSError:
            continue
    return False
