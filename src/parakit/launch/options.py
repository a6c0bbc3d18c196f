"""Read the make variables of a run from the environment into `Options`, and write them back."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from megatron_patches.fusions import NAMES, parse_fusions
from megatron_patches.patch_file import SEPARATOR, patch_file_sha256
from parakit.cluster import Nodes, Slurm, parse_nodes, parse_slurm_options, read_wandb_key
from parakit.config import settings
from parakit.config.files import ROOT, relative_to_root
from parakit.config.run import Backend, OptimizerName, PatchFile, RuntimeName
from parakit.config.setting import (
    SettingError,
    format_setting,
    parse_setting,
    parse_settings,
    settings_by_field,
)
from parakit.config.settings import Setting
from parakit.config.variable_groups import TRAIN
from parakit.launch.network import format_rate, parse_rate

_FUSED = settings.FUSED._replace(kind=f"a list with commas of {', '.join(NAMES)}")

WANDB_PROJECT = "megatron-parallelism"
WANDB_SETTINGS = (
    Setting("WANDB_PROJECT", settings.TEXT, "project in W&B"),
    Setting("WANDB_ENTITY", settings.TEXT, "account or team in W&B"),
    Setting("WANDB_MODE", "online, offline or disabled", "whether the run is uploaded"),
)
"""Variables of W&B's own client, which this kit reads too."""


@dataclass(frozen=True)
class Wandb:
    """The project, account and mode with which a run is logged to W&B."""

    project: str = WANDB_PROJECT
    entity: str | None = None
    mode: str = "offline"
    """`online` or `offline`; `wandb sync` uploads an offline run later."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's flags of the logging, without those that name the run folder (`compose.Launch.arguments`)."""
        entity = ("--wandb-entity", self.entity) if self.entity else ()
        return ("--wandb-project", self.project, *entity)


DEFAULT_KEEP: int = settings.KEEP.default
"""Verified checkpoints that stay unless KEEP= is set: the newest, and one to fall back on."""


@dataclass(frozen=True)
class Saving:
    """The values of SAVE_EVERY=, KEEP= and ASYNC_SAVE=: when checkpoints are saved, how many stay, who writes them."""

    every: int
    """Iterations from one checkpoint to the next."""
    keep: int = DEFAULT_KEEP
    """Verified checkpoints that stay."""
    asynchronous: bool = False
    """Whether a separate process writes a checkpoint while training continues."""


@dataclass(frozen=True)
class Options:
    """The make variables of a run; None means that the variable is not set.

    A field that is `Annotated` holds the value of the one variable that its annotation names, which also has the
    default.
    """

    model: Annotated[str | None, settings.MODEL] = None
    """Name of a model, or path of a model's file."""
    iterations: Annotated[int | None, settings.ITERS] = None
    extra: Annotated[tuple[str, ...], settings.EXTRA] = settings.EXTRA.default
    micro_batch_size: Annotated[int | None, settings.MICRO_BATCH] = None
    global_batch_size: Annotated[int | None, settings.GLOBAL_BATCH] = None
    seed: Annotated[int, settings.SEED] = settings.SEED.default
    dropout: Annotated[float | None, settings.DROPOUT] = None
    data: Annotated[str | None, settings.DATA] = None
    shared_start: Annotated[bool | None, settings.SHARED_START] = None
    """Whether runs start from a shared initial checkpoint, so that losses can be compared. None does so on CPU
    ranks.
    """
    noisy_start: bool = False
    """Whether parameters whose initial value is constant get noise in the initial checkpoint. Only verifications
    ask for it.
    """
    dry_run: Annotated[bool, settings.DRY_RUN] = settings.DRY_RUN.default
    megatron_lm: Annotated[Path | None, settings.MEGATRON_LM] = None
    allow_unknown_megatron: Annotated[bool, settings.ALLOW_UNKNOWN_MEGATRON] = (
        settings.ALLOW_UNKNOWN_MEGATRON.default
    )
    """Whether to train with a Megatron version with which the patches are untested."""
    runs: Annotated[Path, settings.RUNS] = ROOT / "runs"
    runtime: Annotated[RuntimeName | None, settings.RUNTIME] = None
    image: Annotated[str | None, settings.IMAGE] = None
    """NGC tag of a pair in `docker/versions.env`; None takes the first pair."""
    wandb: Wandb | None = None
    ledger: Annotated[bool, settings.LEDGER] = settings.LEDGER.default
    """Whether to count what ranks send, hold in memory and wait for."""
    backend: Annotated[Backend, settings.BACKEND] = Backend.MEGATRON
    optimizer: Annotated[OptimizerName, settings.OPTIMIZER] = OptimizerName.ADAMW
    link_bits_per_second: int | None = None
    """Limit of the link between the two halves of the ranks, in each direction; None sets no limit."""
    repeats: Annotated[int, settings.REPEATS] = settings.REPEATS.default
    """Number of runs of the same launch; the report pools them."""
    calibrate: Annotated[bool, settings.CALIBRATE] = settings.CALIBRATE.default
    """Whether to measure this machine before `train-auto-…` plans for it."""
    nodes: Nodes | None = None
    host_network: Annotated[bool, settings.HOST_NETWORK] = settings.HOST_NETWORK.default
    """Whether containers use this machine's network."""
    run_folder: Annotated[Path | None, settings.RUN_FOLDER] = None
    """A folder that exists before the run starts, such as a Slurm job's; None makes one."""
    slurm: Slurm | None = None
    """How to submit the run as a Slurm job; None trains it here."""
    saving: Saving | None = None
    grace_seconds: Annotated[int | None, settings.GRACE] = None
    """Time that ranks get for a last checkpoint when the run is stopped; None takes what earlier saves took. It
    counts if the run saves checkpoints and its ranks have Megatron's handler of SIGTERM.
    """
    hang_timeout_seconds: Annotated[float, settings.HANG_TIMEOUT] = settings.HANG_TIMEOUT.default
    """Time without a new log line after which a run is ended and the stacks of its ranks are written. NCCL's own
    timeout of a collective, 600 s, is shorter, so that NCCL reports its error first.
    """
    fused: tuple[str, ...] = ()
    """Names of the patches of `megatron_patches/fused` to apply; none unless FUSED= is set."""
    share_gpu: Annotated[bool, settings.SHARE_GPU] = settings.SHARE_GPU.default
    """Whether all ranks use one GPU. Memory and losses are then valid; times are not comparable."""
    patch_file: PatchFile | None = None
    """A Python file that every rank executes before it trains."""


NO_OPTIONS = Options()


def options_from_namespace(variables: Namespace) -> Options:
    """Return the options from a command's parsed variables (`src/parakit/cli/options.py`).

    Raises:
        LaunchError: A value is not of its variable's kind; the message names both.
    """
    plain_values = {}
    for field, setting in _SETTING_BY_FIELD.items():
        value = _read_value(variables, setting)
        if value is not None:
            plain_values[field] = value
    return Options(
        **plain_values,
        nodes=parse_nodes(variables),
        slurm=parse_slurm_options(variables),
        wandb=choose_wandb(variables) if _read_value(variables, settings.WANDB) else None,
        saving=_read_saving(variables),
        link_bits_per_second=_parse_special_setting(variables, settings.NET, parse_rate),
        fused=_parse_special_setting(variables, _FUSED, parse_fusions) or (),
        patch_file=_parse_special_setting(variables, settings.PATCH_FILE, read_patch_file),
    )


def _read_value(variables: Namespace, setting: Setting) -> Any:
    """Return a variable's value; None if it is not set, or if the command does not take it."""
    return getattr(variables, setting.name.lower(), None)


def options_from_texts(texts: Mapping[str, str]) -> Options:
    """Return the options from a target's variables as texts, as they stand in an environment or a file.

    Raises:
        LaunchError, SettingError: A value is not of its variable's kind; the message names both.
    """
    return options_from_namespace(Namespace(**parse_settings(RUN_SETTINGS, texts)))


def format_variables(options: Options) -> dict[str, str]:
    """Return the make variables that set these options, as texts by name, in the order of RUN_SETTINGS.

    Options with their default value and the variables of Slurm are left out.
    """
    defaults = Options()
    value_by_setting: dict[Setting, object] = {}
    for field, setting in _SETTING_BY_FIELD.items():
        value = getattr(options, field)
        if value != getattr(defaults, field):
            value_by_setting[setting] = value
    value_by_setting |= _collect_values_of_groups(options)
    texts = {}
    for setting in RUN_SETTINGS:
        value = value_by_setting.get(setting)
        if value not in (None, ""):
            texts[setting.name] = format_setting(value)
    return texts


def _collect_values_of_groups(options: Options) -> dict[Setting, object]:
    """Return the values of make variables that have no field of their own in `Options`.

    They are the variables of saving, W&B and several nodes, and the variables that `Options` stores in another
    form. The result may leave out a variable that has its default, or have None or an empty value for it.
    """
    saving, wandb, nodes = options.saving, options.wandb, options.nodes
    bits = options.link_bits_per_second
    values: dict[Setting, object] = {
        settings.NET: format_rate(bits) if bits else None,
        settings.FUSED: ",".join(options.fused),
        settings.PATCH_FILE: options.patch_file.path if options.patch_file else None,
    }
    if saving:
        values[settings.SAVE_EVERY] = saving.every
        values[settings.KEEP] = saving.keep if saving.keep != DEFAULT_KEEP else None
        values[settings.ASYNC_SAVE] = saving.asynchronous or None
    if wandb:
        values[settings.WANDB] = True
        wandb_values = (wandb.project, wandb.entity, wandb.mode)
        values |= dict(zip(WANDB_SETTINGS, wandb_values, strict=True))
    if nodes:
        node_values = (nodes.count, nodes.rank, nodes.address, nodes.port, nodes.rendezvous)
        values |= dict(zip(settings.NODE_SETTINGS, node_values, strict=True))
    return values


_SETTING_BY_FIELD = settings_by_field(Options)
"""The variable of each field of `Options` that has a variable of its own."""


def _parse_special_setting(
    variables: Namespace, setting: Setting, parse: Callable[[str], Any]
) -> Any:
    """Return a variable's value as `parse` reads it, for kinds that only this package knows; None if it is not set."""
    text = _read_value(variables, setting)
    return parse_setting(setting, text, parse) if text else None


def _read_saving(variables: Namespace) -> Saving | None:
    """Return how checkpoints are saved; None without SAVE_EVERY=."""
    every = _read_value(variables, settings.SAVE_EVERY)
    if not every:
        return None
    return Saving(
        every=every,
        keep=_read_value(variables, settings.KEEP) or DEFAULT_KEEP,
        asynchronous=_read_value(variables, settings.ASYNC_SAVE) or False,
    )


def patch_file_paths(text: str) -> tuple[Path, ...]:
    """Return the paths in the text of `PATCH_FILE=`; a relative path starts at the repository root."""
    return tuple(ROOT / Path(path).expanduser() for path in text.split(SEPARATOR))


def read_patch_file(text: str) -> PatchFile:
    """Return paths and hash of the files that `PATCH_FILE=` names, as the files are now.

    Raises:
        SettingError: A file cannot be read or is not Python.
    """
    paths = patch_file_paths(text)
    texts = text.split(SEPARATOR)
    codes = [_read_python_code(path, named) for path, named in zip(paths, texts, strict=True)]
    return PatchFile(SEPARATOR.join(map(relative_to_root, paths)), patch_file_sha256(codes))


def _read_python_code(path: Path, text: str) -> bytes:
    """Return a file's content after checking that it compiles as Python; `text` names the file in errors."""
    try:
        code = path.read_bytes()
        compile(code, str(path), "exec")
    except OSError as error:
        raise SettingError(
            f"PATCH_FILE={text} cannot be read ({error.strerror}); name a Python file, seen from {ROOT}."
        ) from None
    except (SyntaxError, ValueError) as error:
        reason = str(error)
        if isinstance(error, SyntaxError):
            reason = f"{error.msg} in line {error.lineno}"
        raise SettingError(
            f"PATCH_FILE={text} does not compile ({reason}); correct it, or leave PATCH_FILE= out."
        ) from None
    return code


RUN_SETTINGS = tuple(dict.fromkeys((*_SETTING_BY_FIELD.values(), *TRAIN, *WANDB_SETTINGS)))
"""Every variable of a training target, of `train-auto-…` and of W&B, each once. Commands show them in this order."""


def choose_wandb(variables: Namespace) -> Wandb:
    """Return how a run is logged to W&B: as WANDB_SETTINGS say, on the command line or in the environment.

    Without WANDB_MODE the run is uploaded if there is a key or a login, and else logged offline.
    """
    from_environment = parse_settings(WANDB_SETTINGS, os.environ)
    values = []
    for setting in WANDB_SETTINGS:
        on_command_line = _read_value(variables, setting)
        values.append(on_command_line or from_environment[setting.name.lower()])
    project, entity, mode = values
    if not mode:
        has_key = os.environ.get("WANDB_API_KEY") or read_wandb_key(os.environ)
        mode = "online" if has_key else "offline"
    return Wandb(project or WANDB_PROJECT, entity, mode)
