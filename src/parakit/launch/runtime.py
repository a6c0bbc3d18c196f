"""Choose whether GPU ranks and `prepare-ds-*` run in the kit's image or on this machine, and run a module there."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from parakit.cluster import (
    HUB_VARIABLES,
    IMAGE_PYTHON,
    Container,
    ImagePair,
    check_container,
    check_engine,
    container_user,
    find_pair,
    image_tag,
    inherited_names,
    read_wandb_key,
    refusal_sentences,
    run_program,
)
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.run import DeviceKind, RuntimeName
from parakit.launch.devices import visible_gpus
from parakit.launch.options import Options

IMPORT_SECONDS = 120.0


@dataclass(frozen=True)
class Runtime:
    """The place where ranks run, and the libraries of NVIDIA that it has."""

    name: RuntimeName = RuntimeName.HOST
    transformer_engine: bool = False
    apex: bool = False
    """Whether NVIDIA Apex fuses gradient accumulation, which Megatron's output layer uses even with Transformer
    Engine.
    """
    pair: ImagePair | None = None
    container: Container | None = None


ON_HOST = Runtime()


def choose_runtime(options: Options, device: DeviceKind) -> Runtime:
    """Return the runtime that RUNTIME= names, or the one that fits this machine.

    CPU ranks run on the host unless RUNTIME=docker is set. A Slurm job chooses its runtime where it starts, so
    the host is returned for it. Whether the runtime works is checked later, by `check_launch`.

    Raises:
        LaunchError: IMAGE= names no image pair, or MEGATRON_LM= names a checkout, which a container cannot see.
    """
    is_cpu = device is DeviceKind.CPU
    is_cpu_on_host = is_cpu and (image_tag() or options.runtime is not RuntimeName.DOCKER)
    if is_cpu_on_host or options.slurm is not None:
        return ON_HOST
    if image_tag() or (options.runtime or default_runtime()) is RuntimeName.HOST:
        # This may be a process in the kit's image, where Transformer Engine and Apex are installed.
        apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
        return Runtime(transformer_engine=can_import_transformer_engine(), apex=apex)
    if options.megatron_lm is not None:
        raise LaunchError(
            f"MEGATRON_LM={options.megatron_lm} is a checkout on this machine, but a container trains "
            "with its image's own Megatron; unset MEGATRON_LM, or set RUNTIME=host."
        )
    if options.wandb and options.wandb.mode == "online":
        _export_wandb_key()
    return docker_runtime(find_pair(options.image), not is_cpu, options.host_network)


def _export_wandb_key() -> None:
    """Set WANDB_API_KEY in this process to the key of `wandb login`, if it is not set.

    A container does not see the login's netrc file; docker passes the variable on by its name.
    """
    key = None if os.environ.get("WANDB_API_KEY") else read_wandb_key(os.environ)
    if key:
        os.environ["WANDB_API_KEY"] = key


def docker_runtime(pair: ImagePair, gpus: bool = True, host_network: bool = False) -> Runtime:
    """Return the runtime of a container of a pair's image, with this machine's GPUs unless `gpus` is False."""
    # The engine may be missing: a dry run needs none, and a real run is refused later.
    user, names = container_user(check_engine()[1]), inherited_names()
    container = Container(pair.name, user, (ROOT,), names, gpus, host_network)
    return Runtime(RuntimeName.DOCKER, True, True, pair, container)


def default_runtime() -> RuntimeName:
    """Return the runtime without RUNTIME=: docker if its engine can give NVIDIA GPUs to containers, else the host."""
    if is_inside_container() or not visible_gpus():
        return RuntimeName.HOST
    engine = check_engine()[1]
    return RuntimeName.DOCKER if engine and engine.gives_gpus else RuntimeName.HOST


def is_inside_container() -> bool:
    """Return True in a container of any kind, where the paths of a mount would be the host's."""
    markers = (Path("/.dockerenv"), Path("/run/.containerenv"))
    return bool(image_tag()) or any(marker.exists() for marker in markers)


@cache
def can_import_transformer_engine() -> bool:
    """Return True if Transformer Engine can be imported; if it was built for another torch, it cannot."""
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    command = [sys.executable, "-c", "import transformer_engine.pytorch"]
    return run_program(command, IMPORT_SECONDS).succeeded


def prepare_dataset(module_arguments: Sequence[str], options: Options, target: str) -> int:
    """Run a command of `tools.preprocess` on the runtime that RUNTIME= names; return as `run_module` does.

    Raises:
        LaunchError: INPUT= is set, which this target would ignore; or as `run_module`.
    """
    if text := os.environ.get("INPUT"):
        raise LaunchError(
            f"'make {target}' has its own text and does not read INPUT={text}; use 'make prepare-ds "
            f"INPUT={text} NAME=…', or unset INPUT."
        )
    return run_module(("tools.preprocess", *module_arguments), options)


def prepare_own_text(variables: Namespace, options: Options) -> int:
    """Make the data set `owt-ds/NAME` from the user's text INPUT=; return as `run_module` does.

    The options in ARGS= are passed on after the kit's own, so they count in a conflict.
    """
    output = ("--output-prefix", f"owt-ds/{variables.name}")
    kit_flags = ("--append-eod", "--tokenizer", "gpt2", *output, "--input", variables.input)
    flags = (*kit_flags, *variables.args)
    return run_module(("tools.preprocess", *flags), options, variables.input)


def run_module_arguments(parser: ArgumentParser) -> None:
    """Add a module's name and its arguments to a parser."""
    parser.add_argument("module_arguments", nargs=REMAINDER)


def run_module(module_arguments: Sequence[str], options: Options, text: str = "") -> int:
    """Replace this process by `python -m WORDS…`; with DRY_RUN=1 print the command and return 0.

    Args:
        module_arguments: The module and its arguments.
        options: RUNTIME=, IMAGE= and DRY_RUN= count.
        text: A file that the module reads. A dry run refuses it as the module would.

    Raises:
        LaunchError: The container or the program cannot be started, or a dry run finds no input.
    """
    in_docker = not image_tag() and (options.runtime or default_runtime()) is RuntimeName.DOCKER
    command = (
        docker_command(module_arguments, options)
        if in_docker
        else (sys.executable, "-m", *module_arguments)
    )
    if options.dry_run:
        print(shlex.join(command))
        _check_input(text)
    if in_docker:
        pair = find_pair(options.image)
        if problems := refusal_sentences(check_container(pair.name, pair.ngc_tag, gpus=False)):
            raise LaunchError(problems[0])
    if options.dry_run:
        return 0
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be run ({error.strerror}).") from None


def _check_input(text: str) -> None:
    """Raise the LaunchError with which `tools.preprocess` would refuse the text that it is to read."""
    from parakit.data import (
        HUB_PREFIX,
        DatasetError,
        find_input_files,
    )

    try:
        find_input_files([text] if text and not text.startswith(HUB_PREFIX) else [])
    except DatasetError as error:
        raise LaunchError(str(error)) from None


def docker_command(arguments: Sequence[str], options: Options) -> tuple[str, ...]:
    """Return the command that runs a module in a container without GPUs.

    Folders that the arguments name are mounted, and so is the user's cache of the hub. A default cache that
    holds a data set of the arguments is named by HF_HUB_CACHE, because the container has another home.
    """
    from parakit.data import HUB_CACHES, HUB_PREFIX, find_default_hub_cache

    for argument in arguments:
        if cache := find_default_hub_cache(argument.removeprefix(HUB_PREFIX)):
            os.environ["HF_HUB_CACHE"] = str(cache)
    user, names = container_user(check_engine()[1]), inherited_names(*HUB_VARIABLES, *HUB_CACHES)
    caches = [Path(os.environ[variable]) for variable in HUB_CACHES if os.environ.get(variable)]
    container = Container(find_pair(options.image).name, user, inherited=names, gpus=False)
    mounted = container.mounting(*find_named_folders(arguments), *filter(Path.is_dir, caches))
    return mounted.wrap((IMAGE_PYTHON, "-m", *arguments), ())


def find_named_folders(arguments: Sequence[str]) -> Iterator[Path]:
    """Yield the folders of the files, folders and globs among some arguments, as named and with links resolved."""
    for argument in arguments:
        if "/" not in argument:
            continue
        path = ROOT / Path(argument).expanduser()
        folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
        # An argument that leads to the root is no path, and the root is never mounted.
        if folder != Path(folder.root):
            yield Path(os.path.normpath(folder))
            yield folder.resolve()
            if path.exists():
                yield path.resolve() if path.is_dir() else path.resolve().parent
