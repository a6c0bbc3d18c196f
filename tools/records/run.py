"""What a run leaves on disk: the contract between those who write run folders and those who read them.

A run folder is `runs/<UTC time>-<strategy>-<model>-<N><gpu|cpu>/`; the file names are below.
Nothing here imports torch or any other part of the kit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from tools.spec.run import DeviceKind
from tools.spec.strategy import Batch, Parallelism

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
LEDGER_FOLDER = "ledger"
"""Each rank's own ledger while it runs; the five files above are gathered from it."""
STACKS_FOLDER = "stacks"
"""Where each rank was when a hang was noticed, `rank<N>.txt`."""
CHECKPOINTS_FOLDER = "checkpoints"
ATTEMPTS_FOLDER = "attempts"
"""What earlier attempts of a resumed run left, `1/`, `2/`, …; log, events and checkpoints go on."""
TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"


class Status(StrEnum):
    """How a run ended."""

    OK = "ok"
    OUT_OF_MEMORY = "oom"
    NAN = "nan"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    INCOMPLETE = "incomplete"
    NO_LOG = "no_log"


@dataclass(frozen=True)
class DatasetIdentity:
    """Which tokens a run was given."""

    prefix: str
    sha256: str | None = None
    """Of the `.bin` file, as recorded when the data set was made."""


@dataclass(frozen=True)
class Entry:
    """The program that trained: where it came from and which Megatron it ran."""

    path: str
    megatron_version: str
    megatron_commit: str | None = None


@dataclass(frozen=True)
class DeviceLink:
    """How two ranks' GPUs are joined; None is what the driver does not tell."""

    first: int
    second: int
    topology: str | None = None
    """Their nearest common ancestor, such as `one PCIe switch`."""
    nvlinks: int | None = None
    """Active NVLinks between them, directly or over a switch; 0 is none."""
    peer_access: bool | None = None
    """Whether one reads the other's memory directly."""


@dataclass(frozen=True)
class Host:
    """Where a run was made."""

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
    """Where a run went on from."""

    run: str
    """The run folder whose checkpoint was loaded: its own, or its parent's where the layout changed."""
    iteration: int
    """Of the checkpoint; the first iteration trained is the next one."""


@dataclass(frozen=True)
class RunRecord:
    """`run.json`: what was asked, and where it ran."""

    run: str
    created_utc: str
    backend: str
    strategy: str
    model: str
    device: DeviceKind
    parallelism: Parallelism
    batch: Batch
    seq_length: int
    dtype: str
    dropout: float
    seed: int
    exit_interval: int
    """Iterations asked for: Megatron's `--exit-interval`."""
    argv: tuple[str, ...]
    """Megatron's arguments, without program and entry."""
    command: tuple[str, ...]
    environment: dict[str, str]
    """What the kit set beyond the caller's environment; never a secret."""
    entry: Entry
    host: Host
    software: dict[str, str]
    dataset: DatasetIdentity | None = None
    start_checkpoint: str | None = None
    """Identity of the shared starting weights; runs are comparable in loss only if it is equal."""
    kit_commit: str | None = None
    runtime: str = "host"
    """`docker` or `host`."""
    image: str | None = None
    """The container's image and its digest, `name@sha256:…`."""
    link_bits_per_second: int | None = None
    """Limit of the link between the two halves of the ranks (`NET=`); None is none."""
    save_every: int | None = None
    """Iterations between checkpoints; None: none are saved."""
    resumptions: tuple[Resumption, ...] = ()
    """In order; empty for a run that was never resumed."""
    shares_gpu: bool = False
    """All ranks were on one GPU: its times say nothing about the strategy."""
    schema: int = 1


@dataclass(frozen=True)
class StatusRecord:
    """`status.json`: how the run ended and why."""

    status: Status
    exit_code: int | None = None
    reason: str = ""
    rank: int | None = None
    """The rank that failed first, where the log tells."""
    finished_utc: str | None = None
    wall_seconds: float | None = field(default=None)


@dataclass(frozen=True)
class JobRecord:
    """`job.json`: the Slurm job that trains, or waits to."""

    job_id: str
    """Of an array's element as Slurm writes it, `12_0`."""
    nodes: int
    submitted_utc: str
    image: str | None = None
    """The container's image that was asked for, taken where the site has Pyxis; None is the host."""
    submitted: RunRecord | None = None
    """The run as composed where it was submitted. Nodes compose it anew, with the Megatron, the fused
    kernels and the checkpoints that they find, so `run.json` may say something else later."""


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


def read_run(folder: Path) -> RunRecord:
    """Read `run.json`.

    Raises:
        FileNotFoundError: The folder has no `run.json`.
        msgspec.DecodeError: The file is not JSON of this shape.
    """
    return msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=RunRecord)


def read_status(folder: Path) -> StatusRecord:
    """Read `status.json`; raises as `read_run` does."""
    return msgspec.json.decode((folder / STATUS_FILE).read_bytes(), type=StatusRecord)
