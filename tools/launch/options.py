"""The make variables of a run, read from the environment in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_patches.fusions import NAMES, parse_fusions
from megatron_patches.plant import SEPARATOR, plant_sha256
from tools.launch.checkpoint.saving import KEEP, Saving
from tools.launch.checks.network import wandb_login
from tools.launch.cluster.nodes import Nodes, nodes_from_environment
from tools.launch.cluster.slurm import Slurm, slurm_from_environment
from tools.launch.errors import wrong_settings_refused
from tools.launch.network import LinkRate, parse_rate
from tools.spec import settings
from tools.spec.files import ROOT, from_root
from tools.spec.run import Backend, OptimizerName, Plant, RuntimeName
from tools.spec.setting import Setting, SettingError

HANG_TIMEOUT_SECONDS = 900.0
"""Longer than NCCL's own timeout of a collective (600 s), so that NCCL reports its error first."""


_FUSIONS = f"a list with commas of {', '.join(NAMES)}"


WANDB_PROJECT = "megatron-parallelism"


@dataclass(frozen=True)
class Wandb:
    """A run that is logged to W&B as well."""

    project: str = WANDB_PROJECT
    entity: str | None = None
    mode: str = "offline"
    """`online` or `offline`; `wandb sync` uploads an offline run later."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's flags, except those that name the run folder (`compose.Launch.arguments`)."""
        entity = ("--wandb-entity", self.entity) if self.entity else ()
        return ("--wandb-project", self.project, *entity)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the ranks: W&B's client reads its mode from the environment."""
        return {"WANDB_MODE": self.mode}


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
    untried: bool = False
    """Train with a Megatron version that the patches were not tried with."""
    runs: Path = ROOT / "runs"
    runtime: RuntimeName | None = None
    image: str | None = None
    """NGC tag of one of the pairs in `docker/versions.env`; the first is the default."""
    wandb: Wandb | None = None
    ledger: bool = True
    """Count what ranks send, hold and wait for."""
    backend: Backend = Backend.MEGATRON
    optimizer: OptimizerName = OptimizerName.ADAMW
    network: LinkRate | None = None
    repeats: int = 1
    """Runs of the same launch; the report pools them."""
    calibrate: bool = False
    """Measure this machine before `train-auto-…` plans for it."""
    nodes: Nodes | None = None
    host_network: bool = False
    """Let containers use this machine's network."""
    run_folder: Path | None = None
    """A folder that exists before the run starts, as a Slurm job's does."""
    slurm: Slurm | None = None
    """Submit a job instead of training here."""
    given: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """The variables as they were set, for a run that starts on another machine."""
    saving: Saving | None = None
    hang_timeout_seconds: float = HANG_TIMEOUT_SECONDS
    """A run whose log does not grow for this long is ended, and the stacks of its ranks are written."""
    fused: tuple[str, ...] = ()
    """Patches of `megatron_patches/fused` by name; none unless asked for."""
    share_gpu: bool = False
    """Put all ranks on one GPU: memory and losses are valid, times are not comparable."""
    plant: Plant | None = None
    """A Python file that every rank executes before it trains."""


def options_from_environment(environment: Mapping[str, str] = os.environ) -> Options:
    """Read the variables of training targets (`tools/spec/settings.py`).

    Raises:
        LaunchError: A value is not of its kind; the message names variable and value.
    """

    def read[T](setting: Setting[T]) -> T | None:
        if text := environment.get(setting.name, ""):
            given[setting.name] = text
        return setting.value(environment)

    given: dict[str, str] = {}
    read(settings.MODEL)  # `load_model` takes it from the environment, also that of a job.
    with wrong_settings_refused():
        options = Options(
            iterations=read(settings.ITERS),
            extra=read(settings.EXTRA) or (),
            micro_batch_size=read(settings.MICRO_BATCH),
            global_batch_size=read(settings.GLOBAL_BATCH),
            seed=read(settings.SEED) or Options.seed,
            dropout=read(settings.DROPOUT),
            data=read(settings.DATA),
            shared_start=read(settings.SHARED_START),
            dry_run=read(settings.DRY_RUN) or False,
            megatron_lm=read(settings.MEGATRON_LM),
            untried=read(settings.UNTRIED) or False,
            runs=Path(read(settings.RUNS) or Options.runs),
            runtime=read(settings.RUNTIME),
            image=read(settings.IMAGE),
            wandb=wandb_from_environment(environment) if read(settings.WANDB) else None,
            ledger=read(settings.LEDGER) is not False,
            backend=read(settings.BACKEND) or Backend.MEGATRON,
            optimizer=read(settings.OPTIMIZER) or OptimizerName.ADAMW,
            network=read(settings.NET.read_as(parse_rate)),
            repeats=read(settings.REPEATS) or Options.repeats,
            calibrate=read(settings.CALIBRATE) or False,
            nodes=nodes_from_environment(environment),
            host_network=read(settings.HOST_NETWORK) or False,
            run_folder=read(settings.RUN_FOLDER),
            slurm=slurm_from_environment(environment),
            saving=_saving(
                read(settings.SAVE_EVERY), read(settings.KEEP), read(settings.ASYNC_SAVE)
            ),
            hang_timeout_seconds=read(settings.HANG_TIMEOUT) or Options.hang_timeout_seconds,
            fused=read(settings.FUSED.read_as(parse_fusions, _FUSIONS)) or (),
            share_gpu=read(settings.SHARE_GPU) or False,
            plant=read(settings.PLANT.read_as(read_plant)),
        )
    return replace(options, given=tuple(given.items()))


def _saving(every: int | None, keep: int | None, asynchronous: bool | None) -> Saving | None:
    return Saving(every, keep or KEEP, asynchronous or False) if every else None


def plant_paths(text: str) -> tuple[Path, ...]:
    """The files of `PLANT=`; a relative path is seen from the repository's root."""
    return tuple(ROOT / Path(one).expanduser() for one in text.split(SEPARATOR))


def read_plant(text: str) -> Plant:
    """The files of `PLANT=`, as they are now.

    Raises:
        SettingError: One cannot be read, or is not Python.
    """
    paths = plant_paths(text)
    codes = [
        _compiled(path, named) for path, named in zip(paths, text.split(SEPARATOR), strict=True)
    ]
    return Plant(SEPARATOR.join(map(from_root, paths)), plant_sha256(codes))


def _compiled(path: Path, text: str) -> bytes:
    """What a file holds, if it is Python."""
    try:
        code = path.read_bytes()
        compile(code, str(path), "exec")
    except OSError as error:
        raise SettingError(
            f"PLANT={text} cannot be read ({error.strerror}); name a Python file, seen from {ROOT}."
        ) from None
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        why = error.msg if isinstance(error, SyntaxError) else error
        raise SettingError(
            f"PLANT={text} does not compile ({why}{line}); correct it, or leave PLANT= out."
        ) from None
    return code


def wandb_from_environment(environment: Mapping[str, str]) -> Wandb:
    """WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE; online only with a key, or after `wandb login`."""
    known = environment.get("WANDB_API_KEY") or wandb_login(environment)
    mode = "online" if known else "offline"
    return Wandb(
        project=settings.WANDB_PROJECT.value(environment) or WANDB_PROJECT,
        entity=settings.WANDB_ENTITY.value(environment),
        mode=settings.WANDB_MODE.value(environment) or mode,
    )
