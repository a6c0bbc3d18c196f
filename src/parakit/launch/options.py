"""The make variables of a run, read from the environment in one place."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from megatron_patches.fusions import NAMES, parse_fusions
from megatron_patches.patch_file import SEPARATOR, patch_file_sha256
from parakit.cluster import Nodes, Slurm, parse_nodes, parse_slurm_options, read_wandb_key
from parakit.config import settings
from parakit.config.files import ROOT, relative_to_root
from parakit.config.run import Backend, OptimizerName, PatchFile, RuntimeName
from parakit.config.setting import SettingError, format_setting, parse_setting, parse_settings
from parakit.config.settings import Setting
from parakit.launch.network import format_rate, parse_rate

_FUSED = settings.FUSED._replace(kind=f"a list with commas of {', '.join(NAMES)}")

WANDB_PROJECT = "megatron-parallelism"
WANDB_SETTINGS = (
    Setting("WANDB_PROJECT", settings.TEXT, "project in W&B"),
    Setting("WANDB_ENTITY", settings.TEXT, "account or team in W&B"),
    Setting("WANDB_MODE", "online, offline or disabled", "whether the run is uploaded"),
)
"""Variables of W&B's own client, which this kit reads as well."""


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


DEFAULT_KEEP = 2
"""Verified checkpoints that stay unless KEEP= says otherwise: the newest, and one to fall back on."""


@dataclass(frozen=True)
class Saving:
    """What SAVE_EVERY=, KEEP= and ASYNC_SAVE= ask for."""

    every: int
    """Iterations."""
    keep: int = DEFAULT_KEEP
    asynchronous: bool = False
    """Written by a process of its own, while training continues."""


@dataclass(frozen=True)
class Options:
    """Make variables; None is "not given". What is `Annotated` is the value of the one that it names."""

    model: Annotated[str | None, settings.MODEL] = None
    """The path of a model's file, or a name."""
    iterations: Annotated[int | None, settings.ITERS] = None
    extra: Annotated[tuple[str, ...], settings.EXTRA] = ()
    micro_batch_size: Annotated[int | None, settings.MICRO_BATCH] = None
    global_batch_size: Annotated[int | None, settings.GLOBAL_BATCH] = None
    seed: Annotated[int, settings.SEED] = 1234
    dropout: Annotated[float | None, settings.DROPOUT] = None
    data: Annotated[str | None, settings.DATA] = None
    shared_start: Annotated[bool | None, settings.SHARED_START] = None
    """Start from the shared checkpoint, so that losses can be compared; the default on CPU ranks."""
    noisy_start: bool = False
    """Give parameters that start constant noise in that checkpoint: verifications alone ask for it."""
    dry_run: Annotated[bool, settings.DRY_RUN] = False
    megatron_lm: Annotated[Path | None, settings.MEGATRON_LM] = None
    allow_unknown_megatron: Annotated[bool, settings.ALLOW_UNKNOWN_MEGATRON] = False
    """Train with a Megatron version that the patches were not tried with."""
    runs: Annotated[Path, settings.RUNS] = ROOT / "runs"
    runtime: Annotated[RuntimeName | None, settings.RUNTIME] = None
    image: Annotated[str | None, settings.IMAGE] = None
    """NGC tag of one of the pairs in `docker/versions.env`; the first is the default."""
    wandb: Wandb | None = None
    ledger: Annotated[bool, settings.LEDGER] = True
    """Count what ranks send, hold and wait for."""
    backend: Annotated[Backend, settings.BACKEND] = Backend.MEGATRON
    optimizer: Annotated[OptimizerName, settings.OPTIMIZER] = OptimizerName.ADAMW
    link_bits_per_second: int | None = None
    """Limit of the link between the two halves of the ranks, each way."""
    repeats: Annotated[int, settings.REPEATS] = 1
    """Runs of the same launch; the report pools them."""
    calibrate: Annotated[bool, settings.CALIBRATE] = False
    """Measure this machine before `train-auto-…` plans for it."""
    nodes: Nodes | None = None
    host_network: Annotated[bool, settings.HOST_NETWORK] = False
    """Let containers use this machine's network."""
    run_folder: Annotated[Path | None, settings.RUN_FOLDER] = None
    """A folder that exists before the run starts, as a Slurm job's does."""
    slurm: Slurm | None = None
    """Submit a job instead of training here."""
    saving: Saving | None = None
    hang_timeout_seconds: Annotated[float, settings.HANG_TIMEOUT] = 900.0
    """A run whose log does not grow for this long is ended, and the stacks of its ranks are written.
    NCCL's own timeout of a collective, 600 s, is shorter, so that it reports its error first."""
    fused: tuple[str, ...] = ()
    """Patches of `megatron_patches/fused` by name; none unless asked for."""
    share_gpu: Annotated[bool, settings.SHARE_GPU] = False
    """Put all ranks on one GPU: memory and losses are valid, times are not comparable."""
    patch_file: PatchFile | None = None
    """A Python file that every rank executes before it trains."""


NO_OPTIONS = Options()


def options_from_namespace(given: Namespace) -> Options:
    """The variables that a command was given (`src/parakit/cli/options.py`), as options.

    Raises:
        LaunchError: A value is not of its kind; the message names variable and value.
    """

    def value(setting: Setting) -> Any:
        return getattr(given, setting.name.lower(), None)

    plain = {field: found for field, each in _PLAIN.items() if (found := value(each)) is not None}
    return Options(
        **plain,
        nodes=parse_nodes(given),
        slurm=parse_slurm_options(given),
        wandb=choose_wandb(given) if value(settings.WANDB) else None,
        saving=_saving(*map(value, (settings.SAVE_EVERY, settings.KEEP, settings.ASYNC_SAVE))),
        link_bits_per_second=_parsed(given, settings.NET, parse_rate),
        fused=_parsed(given, _FUSED, parse_fusions) or (),
        patch_file=_parsed(given, settings.PATCH_FILE, read_patch_file),
    )


def options_from_texts(texts: Mapping[str, str]) -> Options:
    """Variables of a training target, as they stand in an environment or a file, as options.

    Raises:
        LaunchError, SettingError: A value is not of its kind; the message names variable and value.
    """
    return options_from_namespace(Namespace(**parse_settings(RUN_SETTINGS, texts)))


def format_variables(options: Options) -> dict[str, str]:
    """The options as variables of make: those that are not their defaults, but for Slurm's."""
    unset, saving, wandb, nodes = Options(), options.saving, options.wandb, options.nodes
    bits = options.link_bits_per_second
    found: dict[Setting, object] = {
        setting: value
        for field, setting in _PLAIN.items()
        if (value := getattr(options, field)) != getattr(unset, field)
    }
    found |= {
        settings.NET: format_rate(bits) if bits else None,
        settings.FUSED: ",".join(options.fused),
        settings.PATCH_FILE: options.patch_file.path if options.patch_file else None,
    }
    if saving:
        found[settings.SAVE_EVERY] = saving.every
        found[settings.KEEP] = saving.keep if saving.keep != DEFAULT_KEEP else None
        found[settings.ASYNC_SAVE] = saving.asynchronous or None
    if wandb:
        found[settings.WANDB] = True
        found |= dict(zip(WANDB_SETTINGS, (wandb.project, wandb.entity, wandb.mode), strict=True))
    if nodes:
        place = (nodes.count, nodes.rank, nodes.address, nodes.port, nodes.rendezvous)
        found |= dict(zip(settings.NODE_SETTINGS, place, strict=True))
    ordered = (setting for setting in RUN_SETTINGS if found.get(setting) not in (None, ""))
    return {setting.name: format_setting(found[setting]) for setting in ordered}


_PLAIN: dict[str, Setting] = {
    name: kind.__metadata__[0]
    for name, kind in get_type_hints(Options, include_extras=True).items()
    if get_origin(kind) is Annotated
}
"""Fields that are one variable's value."""


def _parsed(given: Namespace, setting: Setting, parse: Callable[[str], Any]) -> Any:
    """A value whose kind this package knows alone; None where it was not given."""
    text = getattr(given, setting.name.lower(), None)
    return parse_setting(setting, text, parse) if text else None


def _saving(every: int | None, keep: int | None, asynchronous: bool | None) -> Saving | None:
    return Saving(every, keep or DEFAULT_KEEP, asynchronous or False) if every else None


def patch_file_paths(text: str) -> tuple[Path, ...]:
    """The files of `PATCH_FILE=`; a relative path is seen from the repository's root."""
    return tuple(ROOT / Path(one).expanduser() for one in text.split(SEPARATOR))


def read_patch_file(text: str) -> PatchFile:
    """The files of `PATCH_FILE=`, as they are now.

    Raises:
        SettingError: One cannot be read, or is not Python.
    """
    paths = patch_file_paths(text)
    codes = [
        _compiled(path, named) for path, named in zip(paths, text.split(SEPARATOR), strict=True)
    ]
    return PatchFile(SEPARATOR.join(map(relative_to_root, paths)), patch_file_sha256(codes))


def _compiled(path: Path, text: str) -> bytes:
    """What a file holds, if it is Python."""
    try:
        code = path.read_bytes()
        compile(code, str(path), "exec")
    except OSError as error:
        raise SettingError(
            f"PATCH_FILE={text} cannot be read ({error.strerror}); name a Python file, seen from {ROOT}."
        ) from None
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        why = error.msg if isinstance(error, SyntaxError) else error
        raise SettingError(
            f"PATCH_FILE={text} does not compile ({why}{line}); correct it, or leave PATCH_FILE= out."
        ) from None
    return code


RUN_SETTINGS = (
    *_PLAIN.values(),
    *(settings.WANDB, *WANDB_SETTINGS, settings.NET),
    *(settings.SAVE_EVERY, settings.KEEP, settings.ASYNC_SAVE, settings.FUSED, settings.PATCH_FILE),
    *(*settings.NODE_SETTINGS, *settings.SLURM_SETTINGS),
)
"""Every variable of a training target."""


def choose_wandb(given: Namespace) -> Wandb:
    """Return what `OF_WANDB` say, else the environment; online only with a key, or after `wandb login`."""
    from_environment = parse_settings(WANDB_SETTINGS, os.environ)
    project, entity, mode = (
        getattr(given, setting.name.lower(), None) or from_environment[setting.name.lower()]
        for setting in WANDB_SETTINGS
    )
    known = os.environ.get("WANDB_API_KEY") or read_wandb_key(os.environ)
    return Wandb(project or WANDB_PROJECT, entity, mode or ("online" if known else "offline"))
