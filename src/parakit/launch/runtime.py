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
    ApptainerContainer,
    Container,
    ImagePair,
    PodmanContainer,
    check_engine,
    check_podman_engine,
    container_groups,
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

    CPU ranks run on the host unless RUNTIME= names a container's program. A Slurm job chooses its runtime where it
    starts, so the host is returned for it. Whether the runtime works is checked later, by `check_launch`.

    Raises:
        LaunchError: IMAGE= names no image pair, or MEGATRON_LM= names a checkout, which a container cannot see.
    """
    is_in_image = bool(image_tag())
    if options.slurm is not None:
        return ON_HOST
    is_cpu = device is DeviceKind.CPU
    if is_cpu and (is_in_image or options.runtime in (None, RuntimeName.HOST)):
        return ON_HOST
    name = options.runtime or default_runtime()
    if is_in_image or name is RuntimeName.HOST:
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
    return container_runtime(find_pair(options.image), not is_cpu, options.host_network, name=name)


def _export_wandb_key() -> None:
    """Set WANDB_API_KEY in this process to the key of `wandb login`, if it is not set.

    A container does not see the login's netrc file; docker passes the variable on by its name.
    """
    key = None if os.environ.get("WANDB_API_KEY") else read_wandb_key(os.environ)
    if key:
        os.environ["WANDB_API_KEY"] = key


def container_runtime(
    pair: ImagePair,
    gpus: bool = True,
    host_network: bool = False,
    name: RuntimeName = RuntimeName.DOCKER,
) -> Runtime:
    """Return the runtime of a container of a pair's image, with this machine's GPUs unless `gpus` is False."""
    container = make_container(
        name,
        pair.name,
        inherited=inherited_names(),
        gpus=gpus,
        host_network=host_network,
    )
    return Runtime(name, True, True, pair, container)


def make_container(
    name: RuntimeName,
    image: str,
    inherited: tuple[str, ...],
    gpus: bool = False,
    host_network: bool = False,
) -> Container:
    """Return a container that a runtime's program starts as the caller, with the kit's folder.

    The program or its engine may be missing: a dry run needs none, and a real run is refused by `Container.check`.
    """
    mounts, user = (ROOT,), container_user()
    if name is RuntimeName.APPTAINER:
        # Apptainer shares this machine's network with its containers.
        return ApptainerContainer(image, user, mounts, inherited, gpus, host_network=True)
    if name is RuntimeName.PODMAN:
        _, podman_engine = check_podman_engine()
        is_rootless = podman_engine is not None and podman_engine.rootless
        groups = container_groups(podman_engine, "podman")
        return PodmanContainer(
            image, user, mounts, inherited, gpus, host_network, groups, is_rootless
        )
    _, docker_engine = check_engine()
    user, groups = container_user(docker_engine), container_groups(docker_engine)
    return Container(image, user, mounts, inherited, gpus, host_network, groups)


def default_runtime() -> RuntimeName:
    """Return the runtime without RUNTIME=: docker if its engine can give NVIDIA GPUs to containers, else the host."""
    if is_inside_container() or not visible_gpus():
        return RuntimeName.HOST
    _, engine = check_engine()
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
    """Replace this process by `python -m MODULE ARGUMENTS…`; with DRY_RUN=1 print the command and return 0.

    Args:
        module_arguments: The module and its arguments.
        options: RUNTIME=, IMAGE= and DRY_RUN= count.
        text: A file that the module reads (INPUT=), which is refused here if it is missing.

    Raises:
        LaunchError: The container or the program cannot be started, or there is no input.
    """
    name = options.runtime or default_runtime()
    container = None
    command: tuple[str, ...] = (sys.executable, "-m", *module_arguments)
    is_in_image = bool(image_tag())
    if not is_in_image and name is not RuntimeName.HOST:
        container = module_container(module_arguments, options, name)
        command = container.wrap((IMAGE_PYTHON, "-m", *module_arguments), ())
    if options.dry_run:
        print(shlex.join(command))
    _check_input(text)
    if container is not None:
        problems = refusal_sentences(container.check(find_pair(options.image).ngc_tag))
        if problems:
            raise LaunchError(problems[0])
    if options.dry_run:
        return 0
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be run ({error.strerror}).") from None


def _check_input(text: str) -> None:
    """Raise the LaunchError with which `tools.preprocess` would refuse the text of INPUT=."""
    from parakit.data import (
        HUB_PREFIX,
        DatasetError,
        find_input_files,
    )

    try:
        find_input_files([text] if text and not text.startswith(HUB_PREFIX) else [])
    except DatasetError as error:
        raise LaunchError(str(error).replace("--input ", "INPUT=")) from None


def module_container(
    arguments: Sequence[str], options: Options, name: RuntimeName = RuntimeName.DOCKER
) -> Container:
    """Return a container without GPUs for a module with these arguments.

    Folders that the arguments name are mounted, and so is the user's cache of the hub. A default cache that
    holds a data set of the arguments is named by HF_HUB_CACHE, because the container has another home.
    """
    from parakit.data import HUB_CACHES, HUB_PREFIX, find_default_hub_cache

    for argument in arguments:
        cache = find_default_hub_cache(argument.removeprefix(HUB_PREFIX))
        if cache:
            os.environ["HF_HUB_CACHE"] = str(cache)
    folders = list(find_named_folders(arguments))
    for variable in HUB_CACHES:
        cache_path = os.environ.get(variable)
        if cache_path and Path(cache_path).is_dir():
            folders.append(Path(cache_path))
    inherited = inherited_names(*HUB_VARIABLES, *HUB_CACHES)
    container = make_container(name, find_pair(options.image).name, inherited=inherited)
    return container.mounting(*folders)


def find_named_folders(arguments: Sequence[str]) -> Iterator[Path]:
    """Yield the folders of the files, folders and globs among some arguments, as named and with links resolved."""
    for argument in arguments:
        if "/" not in argument:
            continue
        path = ROOT / Path(argument).expanduser()
        # The last parts of a glob, or of a file to write, name no folder.
        folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
        # An argument that leads to the root is no path, and the root is never mounted.
        if folder == Path(folder.root):
            continue
        yield Path(os.path.normpath(folder))
        yield folder.resolve()
        # A file may be a link to another folder.
        if path.is_dir():
            yield path.resolve()
        elif path.exists():
            yield path.resolve().parent
