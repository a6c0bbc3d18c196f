"""Where GPU ranks and `prepare-ds-*` run: in the kit's image, or on this machine."""

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
    """What the ranks of a run find."""

    name: RuntimeName = RuntimeName.HOST
    transformer_engine: bool = False
    apex: bool = False
    """NVIDIA Apex's gradient accumulation, which Megatron's output layer uses even with TE."""
    pair: ImagePair | None = None
    container: Container | None = None


ON_HOST = Runtime()


def choose_runtime(options: Options, device: DeviceKind) -> Runtime:
    """The runtime that RUNTIME= names or that fits the machine; the preflight checks that it works.

    CPU ranks need no image: they run on the host unless RUNTIME=docker asks for one. What Slurm starts
    finds its runtime there.

    Raises:
        LaunchError: IMAGE= names no pair, or MEGATRON_LM= a checkout that the image cannot see.
    """
    on_cpu = device is DeviceKind.CPU
    is_plain = on_cpu and (image_tag() or options.runtime is not RuntimeName.DOCKER)
    if is_plain or options.slurm is not None:
        return ON_HOST
    if image_tag() or (options.runtime or default_runtime()) is RuntimeName.HOST:
        # Inside the kit's image, too, where Transformer Engine and Apex are.
        apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
        return Runtime(transformer_engine=can_import_transformer_engine(), apex=apex)
    if options.megatron_lm is not None:
        raise LaunchError(
            f"MEGATRON_LM={options.megatron_lm} is a checkout of this machine, but in a container the "
            "image's own trains; unset it, or set RUNTIME=host."
        )
    if options.wandb and options.wandb.mode == "online":
        _hand_in_wandb_login()
    return docker_runtime(find_pair(options.image), not on_cpu, options.host_network)


def _hand_in_wandb_login() -> None:
    """Give the container, which sees no netrc, the key of `wandb login`: docker takes it by name."""
    key = None if os.environ.get("WANDB_API_KEY") else read_wandb_key(os.environ)
    if key:
        os.environ["WANDB_API_KEY"] = key


def docker_runtime(pair: ImagePair, gpus: bool = True, host_network: bool = False) -> Runtime:
    """A container of a pair's image."""
    # A dry run needs no engine, and a real one is refused by the preflight.
    user, names = container_user(check_engine()[1]), inherited_names()
    container = Container(pair.name, user, (ROOT,), names, gpus, host_network)
    return Runtime(RuntimeName.DOCKER, True, True, pair, container)


def default_runtime() -> RuntimeName:
    """Docker where an NVIDIA GPU is and an engine that can give it to containers; else the host."""
    if is_inside_container() or not visible_gpus():
        return RuntimeName.HOST
    engine = check_engine()[1]
    return RuntimeName.DOCKER if engine and engine.has_nvidia_runtime else RuntimeName.HOST


def is_inside_container() -> bool:
    """Whether this is a container of any kind; a mount would name paths of the host."""
    markers = (Path("/.dockerenv"), Path("/run/.containerenv"))
    return bool(image_tag()) or any(marker.exists() for marker in markers)


@cache
def can_import_transformer_engine() -> bool:
    """Whether Transformer Engine works here; one that is installed for another torch does not import."""
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    command = [sys.executable, "-c", "import transformer_engine.pytorch"]
    return run_program(command, IMPORT_SECONDS).succeeded


def prepare_dataset(words: Sequence[str], options: Options, target: str) -> int:
    """A command of `tools.preprocess`, where RUNTIME says; as `run_module`."""
    if text := os.environ.get("INPUT"):
        raise LaunchError(
            f"'make {target}' has a text of its own and does not read INPUT={text}; "
            f"'make prepare-ds INPUT={text} NAME=…' does, or unset it."
        )
    return run_module(("tools.preprocess", *words), options)


def prepare_own_text(given: Namespace, options: Options) -> int:
    """Make `owt-ds/NAME` from the user's own text; as `run_module`. ARGS= is passed on, and counts last."""
    output = ("--output-prefix", f"owt-ds/{given.name}")
    plain = ("--append-eod", "--tokenizer", "gpt2", *output, "--input", given.input)
    flags = (*plain, *given.args)
    return run_module(("tools.preprocess", *flags), options, given.input)


def run_module_arguments(parser: ArgumentParser) -> None:
    """A module's name and its arguments."""
    parser.add_argument("words", nargs=REMAINDER)


def run_module(words: Sequence[str], options: Options, text: str = "") -> int:
    """Replace this process by `python -m WORDS…`; with DRY_RUN=1 print the command and return 0.

    Args:
        words: The module and its arguments.
        options: RUNTIME=, IMAGE= and DRY_RUN=.
        text: A file that it reads; a dry run refuses it as the module would.

    Raises:
        LaunchError: The container cannot be started, or a dry run finds no input.
    """
    in_docker = not image_tag() and (options.runtime or default_runtime()) is RuntimeName.DOCKER
    command = docker_command(words, options) if in_docker else (sys.executable, "-m", *words)
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
    """What `tools.preprocess` would refuse of the texts that it is to read."""
    from parakit.data import (
        HUB_PREFIX,
        DatasetError,  # What trains needs neither.
        find_input_files,
    )

    try:
        find_input_files([text] if text and not text.startswith(HUB_PREFIX) else [])
    except DatasetError as error:
        raise LaunchError(str(error)) from None


def docker_command(words: Sequence[str], options: Options) -> tuple[str, ...]:
    """The command in a container without GPUs; folders that the words name are mounted, and one's own
    cache of the hub."""
    from parakit.data import HUB_CACHES  # What trains needs none.

    user, names = container_user(check_engine()[1]), inherited_names(*HUB_VARIABLES, *HUB_CACHES)
    caches = [Path(name) for each in HUB_CACHES if (name := os.environ.get(each))]
    container = Container(find_pair(options.image).name, user, inherited=names, gpus=False)
    mounted = container.mounting(*find_named_folders(words), *filter(Path.is_dir, caches))
    return mounted.wrap((IMAGE_PYTHON, "-m", *words), ())


def find_named_folders(words: Sequence[str]) -> Iterator[Path]:
    """Folders of files, folders and globs among the words, as named and as links lead to them."""
    for word in words:
        if "/" not in word:
            continue
        path = ROOT / Path(word).expanduser()
        folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
        if folder != Path(folder.root):  # The root itself is never mounted: the word is no path.
            yield Path(os.path.normpath(folder))
            yield folder.resolve()
            if path.exists():
                yield path.resolve() if path.is_dir() else path.resolve().parent
