"""The run folder `runs/<UTC time>-<strategy>-<model>-<N><gpu|cpu>/`: names of its files, and their records.

`run.json` (`RunRecord`) says what was asked for and where the run trained. `status.json` (`StatusRecord`) says how
the run ended.
"""

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
"""Folder of the measurements of each rank while it runs, from which the files above are gathered."""
STACKS_FOLDER = "stacks"
"""Folder of the ranks' stacks when a hang was noticed, `rank<N>.txt`, and of their last calls, `rank<N>.pkl`."""
CALLS_SUFFIX = ".pkl"
STACKS_SIGNAL = signal.SIGRTMIN + 3
"""Signal that asks a rank for its stack and its calls.

LLVM, with which Triton compiles, handles SIGUSR1 and SIGUSR2 itself (`lib/Support/Unix/Signals.inc`)."""
STOPPED_FILE = "stopped.txt"
"""File in the folder of stacks with the ranks that a signal had stopped; absent if there were none."""
ASKED_FILE = "asked.txt"
"""File in the folder of stacks with the time at which ranks were asked for their stacks, in ns since 1970."""
CHECKPOINTS_FOLDER = "checkpoints"
ATTEMPTS_FOLDER = "attempts"
"""Folder of the files of earlier attempts of a resumed run, `1/`, `2/`, ….

Log, TensorBoard events and checkpoints are continued and stay outside."""
NODES_FOLDER = "nodes"
"""Folder with a folder for each node but node 0.

Megatron's last rank, which is on the last node, prints the iterations. The ranks of node n write
`nodes/<n>/log.txt`, and node 0 copies new lines from there to the run's `log.txt`.
"""
TENSORBOARD_FOLDER = "tensorboard"

ALIVE_SECONDS = 15.0
"""Age of the last sample at which a run counts as dead.

A run's sampler writes every second. On a network file system other nodes see this some seconds later."""


def utc_now() -> str:
    """Return the current time in UTC in ISO 8601, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def utc_stamp() -> str:
    """Return the current time in UTC as in the names of folders, such as `20260101T120000Z`."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


class Status(StrEnum):
    """Outcome of a run."""

    OK = "ok"
    OUT_OF_MEMORY = "oom"
    NAN = "nan"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    INCOMPLETE = "incomplete"
    NO_LOG = "no_log"
    RUNNING = "running"
    """Status of a run whose file says `incomplete` and that `looks_alive`. No file has it."""


@dataclass(frozen=True)
class BlendPartIdentity:
    """A data set of a blend: its path, its weight and the hash of its tokens."""

    prefix: str
    weight: str | None
    sha256: str


@dataclass(frozen=True)
class DatasetIdentity:
    """Data set of a run, or the blend of several."""

    prefix: str
    """Path without suffix; of a blend the text of DATA=."""
    sha256: str | None = None
    """Hash of the `.bin` file as the run read it (`Dataset.content_sha256`); None in records of older versions
    if the data set had no manifest. Of a blend, the hash of weights and hashes of its data sets."""
    parts: tuple[BlendPartIdentity, ...] | None = None
    """The data sets of a blend; None if there is only one data set."""


@dataclass(frozen=True)
class MegatronEntry:
    """Program that trained: its path and its version of Megatron."""

    path: str
    megatron_version: str
    megatron_commit: str | None = None


@dataclass(frozen=True)
class CodeHashes:
    """Hashes of the source files that trained, as they were on the disk."""

    kit: str
    megatron: str | None = None
    """None if Megatron is in a container image, whose digest identifies it, or if another backend trained."""

    def __str__(self) -> str:
        return f"kit {self.kit}" + (f", Megatron {self.megatron}" if self.megatron else "")

    def joined(self, later: CodeHashes) -> CodeHashes:
        """Return the hashes of a run that began with this code and was resumed with `later`.

        Where the two differ, the result is `first+later`.
        """

        def join_hashes(first: str | None, second: str | None) -> str | None:
            if first == second:
                return first
            return f"{first or 'none'}+{second or 'none'}"

        return CodeHashes(
            kit=join_hashes(self.kit, later.kit) or self.kit,
            megatron=join_hashes(self.megatron, later.megatron),
        )


@dataclass(frozen=True)
class DeviceLink:
    """Connection between the GPUs of two ranks. A field is None if the driver does not report it."""

    first: int
    second: int
    topology: str | None = None
    """Nearest common ancestor of the GPUs, such as `one PCIe switch`."""
    nvlinks: int | None = None
    """Number of active NVLinks between the GPUs, directly or over a switch."""
    peer_access: bool | None = None
    """True if one GPU can read the other's memory directly."""


@dataclass(frozen=True)
class HostRecord:
    """Machine or machines of a run."""

    name: str
    cpu: str
    cores: int
    memory_bytes: int
    devices: tuple[str, ...] = ()
    """Name of the device of each rank; for CPU ranks the processor's name."""
    driver: str | None = None
    interconnect: str | None = None
    links: tuple[DeviceLink, ...] = ()
    """Links of all pairs of GPUs of a node."""
    nodes: tuple[str, ...] = ()
    """Names of all machines, node 0 first; empty if there is only one."""


@dataclass(frozen=True)
class Resumption:
    """Checkpoint from which a run was resumed."""

    run: str
    """Run folder of the checkpoint: the run's own, or its parent's if the strategy changed."""
    iteration: int
    """Iteration of the checkpoint. Training continues with the next one."""


@dataclass(frozen=True)
class RunRecord:
    """`run.json`: what was asked for, and where the run trained."""

    run: str
    created_utc: str
    spec: RunSpec
    """What is trained. In the file these fields are on the top level; see `encode_run`."""
    exit_interval: int
    """Number of iterations that were asked for: Megatron's `--exit-interval`."""
    argv: tuple[str, ...]
    """Megatron's arguments, without program and entry."""
    command: tuple[str, ...]
    environment: dict[str, str]
    """Variables that the kit set in addition to the caller's environment; never a secret."""
    entry: MegatronEntry
    host: HostRecord
    software: dict[str, str]
    dataset: DatasetIdentity | None = None
    start_checkpoint: str | None = None
    """Name of the shared initial checkpoint. Losses are comparable only between runs with the same one."""
    start_weights: str | None = None
    """Hash of the initial weights. A checkpoint that is made again from the same seed has the same hash."""
    kit_commit: str | None = None
    code: CodeHashes | None = None
    """None in records of older versions."""
    runtime: str = "host"
    """`docker`, `podman`, `apptainer` or `host`."""
    image: str | None = None
    """Image of the container with its digest, `name@sha256:…`; None without container."""
    save_every: int | None = None
    """Iterations between checkpoints; None if no checkpoints are saved."""
    resumptions: tuple[Resumption, ...] = ()
    """All resumptions in order; empty for a run that was never resumed."""
    schema: int = 1


HANG_REASON_PREFIX = "Hang: "
"""Prefix of the reason of a run that the launcher ended because the run logged nothing any more."""


@dataclass(frozen=True)
class StatusRecord:
    """`status.json`: how the run ended and why."""

    status: Status
    exit_code: int | None = None
    reason: str = ""
    rank: int | None = None
    """Rank that failed first; None if the log does not name it."""
    finished_utc: str | None = None
    wall_seconds: float | None = None


@dataclass(frozen=True)
class LauncherRecord:
    """`launcher.json`: the process that trains the run, or trained it last. `make stop` ends this process."""

    host: str
    process: int
    started: float
    """Start of the process by the host's clock, in seconds since 1970.

    Another process may have the same number by now; the start tells them apart."""


@dataclass(frozen=True)
class JobRecord:
    """`job.json`: the Slurm job that trains the run or waits to start."""

    job_id: str
    """Number of the job; for an element of an array as Slurm writes it, `12_0`."""
    nodes: int
    submitted_utc: str
    image: str | None = None
    """Container image that was asked for, which is used if the cluster has Pyxis; None for the host."""
    submitted: dict[str, Any] | None = None
    """`run.json` as composed on the machine that submitted the run.

    The nodes compose it again, with their Megatron, fused kernels and checkpoints, so the file may change."""


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
"""Columns of `samples.csv`. A value is empty if the device does not report it."""


def is_run_folder(folder: Path) -> bool:
    """Return True if a folder holds at least one of a run's record, log and status."""
    file_names = (RUN_FILE, LOG_FILE, STATUS_FILE)
    return folder.is_dir() and any((folder / name).exists() for name in file_names)


def encode_run(record: RunRecord) -> dict[str, Any]:
    """Return the content of `run.json` for a record.

    The file has the fields of the record and of its spec side by side. Shape, recomputation, optimizer and fused
    patches of the spec are left out, because they follow from `argv` and `environment`.
    """
    spec = record.spec
    values: dict[str, Any] = msgspec.to_builtins(spec)
    values["strategy"] = spec.name
    values["seq_length"] = spec.shape.seq_length
    # The record's fields are converted one by one. If msgspec converted the record as a whole, it would leave out the
    # defaults that it filled in when it read a file without these fields.
    for field in fields(record):
        values[field.name] = msgspec.to_builtins(getattr(record, field.name))
    return {name: values[name] for name in _FIELD_NAMES}


_RENAMED_FIELDS = {"plant": "patch_file"}
"""Present names of fields of `run.json`, by their names in older versions."""


def decode_run(data: Mapping[str, Any]) -> RunRecord:
    """Return the record for the content of a `run.json`.

    Raises: msgspec.ValidationError: The content has other fields or types, or its arguments define no model.
    """
    data = {_RENAMED_FIELDS.get(name, name): value for name, value in data.items()}
    stored = msgspec.convert(data, _StoredSpec)
    try:
        argv = count_end_of_document_in_vocabulary(stored.argv, stored.entry.megatron_version)
        spec = spec_from_flags(argv, stored.parallelism.world_size, stored.device, stored.model)
    except (ValueError, ZeroDivisionError) as error:
        raise msgspec.ValidationError(str(error)) from None
    # Fields that the file has itself replace those that follow from the flags.
    stored_values: dict[str, Any] = {}
    for field in fields(RunSpec):
        if field.name in stored.__struct_fields__:
            stored_values[field.name] = getattr(stored, field.name)
    patches = stored.environment.get(variables.FUSED, "").split(",")
    fused = tuple(patch for patch in patches if patch)
    spec = replace(spec, fused=fused, **stored_values)
    return msgspec.convert(data | {"spec": msgspec.to_builtins(spec)}, RunRecord)


_FIELD_NAMES = (
    *("run", "created_utc", "backend", "strategy", "model", "device", "parallelism", "batch"),
    *("seq_length", "dtype", "dropout", "seed", "exit_interval", "argv", "command", "environment"),
    *("entry", "host", "software", "dataset", "start_checkpoint", "start_weights", "kit_commit"),
    *("code", "runtime", "image", "link_bits_per_second", "save_every", "resumptions"),
    *("shares_gpu", "patch_file", "schema"),
)
"""Fields of `run.json` in their order."""


class _StoredSpec(msgspec.Struct, kw_only=True):
    """Fields of `run.json` from which the spec is read: its own fields, `argv` and `environment`."""

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
    """Read `run.json` from a run folder.

    Raises:
        FileNotFoundError: The folder has no `run.json`.
        OSError: `run.json` cannot be read, or is no regular file. msgspec.DecodeError: The file is not JSON, or
            has other fields or types.
    """
    return decode_run(
        msgspec.json.decode(read_regular_file(folder / RUN_FILE), type=dict[str, Any])
    )


def write_run(folder: Path, record: RunRecord) -> None:
    """Write the record of a run to `run.json`, atomically."""
    write_record(folder / RUN_FILE, encode_run(record))


def read_status(folder: Path) -> StatusRecord:
    """Read `status.json` from a run folder. It raises the same errors as `read_run`."""
    return msgspec.json.decode(read_regular_file(folder / STATUS_FILE), type=StatusRecord)


def is_running(log: Path) -> bool:
    """Return True if a process of the run that writes this log is alive.

    All processes of a run share a lock on its log, so the lock tells. Without a log, the result is False.
    """
    try:
        with log.open("rb") as file:
            lock_file(file, shared=True)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def looks_alive(folder: Path) -> bool:
    """Return True if a process of this machine holds the run's log, or if a node's samples are recent."""
    try:
        return is_running(folder / LOG_FILE) or _has_recent_samples(folder)
    except OSError:  # The folder belongs to another user, or does not exist.
        return False


def _has_recent_samples(folder: Path) -> bool:
    """Return True if any node wrote a sample less than ALIVE_SECONDS ago."""
    for node_folder in (folder, *(folder / NODES_FOLDER).glob("*")):
        try:
            written = (node_folder / SAMPLES_FILE).stat().st_mtime
        except OSError:
            continue  # The node has written no sample yet.
        if time.time() - written < ALIVE_SECONDS:
            return True
    return False
