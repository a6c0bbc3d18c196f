"""What a user may set beside the target: make variables, read from the environment in one place."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from megatron_patches.fused.names import NAMES, parse_fusions
from tools.launch.checkpoint.saving import KEEP, Saving
from tools.launch.cluster.nodes import Nodes, nodes_from_environment
from tools.launch.cluster.slurm import Slurm, slurm_from_environment
from tools.launch.errors import LaunchError
from tools.launch.network import Rate, parse_rate
from tools.launch.optimizers import OptimizerName
from tools.launch.wandb_logging import Wandb, wandb_from_environment
from tools.spec.files import ROOT
from tools.spec.run import Backend

HANG_TIMEOUT_SECONDS = 900.0
"""Longer than NCCL waits for a collective by itself (600 s), so that its own word is heard first."""


class RuntimeName(StrEnum):
    """Where GPU ranks find torch and Megatron: in NVIDIA's container, or on this machine."""

    DOCKER = "docker"
    HOST = "host"


@dataclass(frozen=True)
class Options:
    """Make variables; None is "not given"."""

    iterations: int | None = None
    extra: tuple[str, ...] = ()
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    seed: int = 1234
    dropout: float | None = None
    data: str | None = None
    shared_start: bool | None = None
    """Start from the shared checkpoint, so that losses can be compared; the default on CPU ranks."""
    dry_run: bool = False
    megatron_lm: Path | None = None
    runs: Path = ROOT / "runs"
    runtime: RuntimeName | None = None
    image: str | None = None
    """NGC tag of one of the pairs in `docker/versions.env`; the first is the default."""
    wandb: Wandb | None = None
    ledger: bool = True
    """Count what ranks send, hold and wait for."""
    backend: Backend = Backend.MEGATRON
    optimizer: OptimizerName = OptimizerName.ADAMW
    network: Rate | None = None
    repeats: int = 1
    """The same run so often; the report pools them."""
    calibrate: bool = False
    """Measure this machine before `train-auto-…` plans for it."""
    nodes: Nodes | None = None
    host_network: bool = False
    """Let containers use this machine's network."""
    run_folder: Path | None = None
    """Of a run that was given one before it starts, as jobs are."""
    slurm: Slurm | None = None
    """Submit a job instead of training here."""
    given: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """The variables behind all this as they were set, for a run that starts elsewhere."""
    saving: Saving | None = None
    hang_timeout_seconds: float = HANG_TIMEOUT_SECONDS
    """A run whose log stands still for so long is ended, with the stacks of its ranks."""
    fused: tuple[str, ...] = ()
    """Patches of `megatron_patches/fused` by name; none unless asked for."""
    share_gpu: bool = False
    """Put all ranks on one GPU: true memory and losses, no comparable times."""


def options_from_environment(environment: Mapping[str, str] = os.environ) -> Options:
    """Read the variables that `make help` names.

    Raises:
        LaunchError: A value is not of its kind; the message names variable and value.
    """
    read = _Reader(environment)
    options = Options(
        iterations=read("ITERS", _positive, "a whole number above 0"),
        extra=read("EXTRA", _words, "flags with closed quotes") or (),
        micro_batch_size=read("MICRO_BATCH", _positive, "a whole number above 0"),
        global_batch_size=read("GLOBAL_BATCH", _positive, "a whole number above 0"),
        seed=read("SEED", _positive, "a whole number above 0") or Options.seed,
        dropout=read("DROPOUT", _probability, "a number from 0 up to, not including, 1"),
        data=read("DATA", str, "a prefix"),
        shared_start=read("SHARED_START", _truth, "0 or 1"),
        dry_run=read("DRY_RUN", _truth, "0 or 1") or False,
        megatron_lm=read("MEGATRON_LM", _folder, "a folder with pretrain_gpt.py"),
        runs=read("RUNS", Path, "a folder") or Options.runs,
        runtime=read("RUNTIME", RuntimeName, "docker or host"),
        image=read("IMAGE", str, "an NGC tag"),
        wandb=wandb_from_environment(environment) if read("WANDB", _truth, "0 or 1") else None,
        ledger=read("LEDGER", _truth, "0 or 1") is not False,
        backend=read("BACKEND", Backend, "megatron, native, deepspeed or bare") or Backend.MEGATRON,
        optimizer=read("OPTIMIZER", OptimizerName, "adamw or muon") or OptimizerName.ADAMW,
        network=read("NET", parse_rate, "a rate such as 1gbps or 200mbps"),
        repeats=read("REPEATS", _positive, "a whole number above 0") or Options.repeats,
        calibrate=read("CALIBRATE", _truth, "0 or 1") or False,
        nodes=nodes_from_environment(environment),
        host_network=read("HOST_NETWORK", _truth, "0 or 1") or False,
        run_folder=read("RUN_FOLDER", Path, "a folder"),
        slurm=slurm_from_environment(environment),
        saving=_saving(read),
        hang_timeout_seconds=read("HANG_TIMEOUT", _positive, "a whole number of seconds above 0")
        or Options.hang_timeout_seconds,
        fused=read("FUSED", parse_fusions, f"a list with commas of {', '.join(NAMES)}") or (),
        share_gpu=read("SHARE_GPU", _truth, "0 or 1") or False,
    )
    return replace(options, given=tuple(read.given.items()))


def _saving(read: _Reader) -> Saving | None:
    every = read("SAVE_EVERY", _positive, "a whole number of iterations above 0")
    keep = read("KEEP", _positive, "a whole number above 0")
    asynchronous = read("ASYNC_SAVE", _truth, "0 or 1")
    return Saving(every, keep or KEEP, asynchronous or False) if every else None


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.given: dict[str, str] = {}

    def __call__[T](self, name: str, convert: Callable[[str], T], wanted: str) -> T | None:
        text = self._environment.get(name, "")
        if not text:
            return None
        self.given[name] = text
        try:
            return convert(text)
        except ValueError:
            raise LaunchError(f"{name}={text} is not {wanted}.") from None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _probability(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise ValueError(text)
    return number


def _truth(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _folder(text: str) -> Path:
    folder = Path(text).expanduser().resolve()
    if not (folder / "pretrain_gpt.py").is_file():
        raise ValueError(text)
    return folder
