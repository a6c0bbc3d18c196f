"""A module of the kit where RUNTIME says: here, or in the image; how `prepare-ds-*` run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.launch.container import docker
from tools.launch.container.image import find_pair
from tools.launch.errors import LaunchError
from tools.launch.options import Options
from tools.launch.runtime import default_runtime, docker_runtime, inside_image
from tools.spec.files import ROOT
from tools.spec.run import RuntimeName


def run_module(words: Sequence[str], options: Options) -> int:
    """Become `python -m WORDS…`; with DRY_RUN=1 print the command. Does not return otherwise.

    Raises:
        LaunchError: The container cannot be started.
    """
    command = (sys.executable, "-m", *words)
    in_docker = not inside_image() and (options.runtime or default_runtime()) is RuntimeName.DOCKER
    if in_docker:
        command = docker_command(words, options)
    if options.dry_run:
        print(shlex.join(command))
        return 0
    if in_docker:
        pair = find_pair(options.image)
        docker.check_container(pair.name, pair.ngc_tag)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be run ({error.strerror}).") from None


def docker_command(words: Sequence[str], options: Options) -> tuple[str, ...]:
    """The same in a container, without GPUs, which also sees the folders that the words name."""
    container = docker_runtime(find_pair(options.image), *docker.HUB).container
    assert container is not None
    command = (docker.PYTHON, "-m", *words)
    return (
        container.mounting(*folders_named(words))
        .without_gpus()
        .wrap(command, (), f"kit-{words[0].rpartition('.')[2]}-{os.getpid()}")
    )


def folders_named(words: Sequence[str]) -> Iterator[Path]:
    """Folders of files, folders and globs among the words, as named and as links lead to them."""
    for word in words:
        if "/" not in word:
            continue
        path = ROOT / Path(word).expanduser()
        folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
        if folder != Path(folder.root):  # Else the word is no path, and the whole machine no mount.
            yield Path(os.path.normpath(folder))
            yield folder.resolve()
            if path.exists():
                yield path.resolve() if path.is_dir() else path.resolve().parent
