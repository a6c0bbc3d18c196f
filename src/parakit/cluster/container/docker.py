"""How a command is wrapped in a container; `checks/docker.py` finds what Docker has here."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from parakit.artifacts.io import write_record
from parakit.cluster.checks.docker import DockerEngine
from parakit.cluster.checks.result import run_program
from parakit.config import variables
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.config.flags import format_flags

IMAGE_PYTHON = "python3"
"""The image's own, which has torch and Transformer Engine."""

ALWAYS = (variables.LEDGER, variables.RUN_MARK, variables.STACKS, "PYTHONUNBUFFERED")
"""Set by the launcher for a run but not part of its recorded environment."""

INHERITED = ("CUDA_VISIBLE_DEVICES", "WANDB_API_KEY", "WANDB_BASE_URL")
"""Caller's variables that a container gets too, besides the kit's own settings."""

INHERITED_PREFIXES = ("NCCL_", "NVTE_", "TORCH_NCCL_")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
HUB_VARIABLES = ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE")
"""Only for commands that fetch data; training needs no token and gets none."""

CONFINED = {
    "--read-only": True,
    "--tmpfs": "/tmp:exec,mode=1777",
    "--cap-drop": "ALL",
    "--security-opt": "no-new-privileges",
}
"""The image is read-only and no privilege can be gained. Compiled kernels are loaded from /tmp, the
container's home, which is a tmpfs and removed with it."""

FOR_NCCL = ("--ipc=host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864")
"""NCCL moves data between ranks through shared memory and pins pages of it."""


PROBE_SECONDS = 180.0
CONTAINER_FILE = "container.id"
"""Beside the log of a run while its container is there; later only where that could not be removed."""


@dataclass(frozen=True)
class Container:
    """A `docker run` without the command."""

    image: str
    user: str
    """`uid:gid` of the caller, so that nothing in the kit ends up as root's."""
    mounts: tuple[Path, ...] = (ROOT,)
    inherited: tuple[str, ...] = ()
    """Names of the caller's variables that are passed on."""
    gpus: bool = True
    host_network: bool = False
    """Only where the caller asked: ranks on several machines must reach each other."""

    def wrap(self, command: Sequence[str], settings: Iterable[str]) -> tuple[str, ...]:
        """A `docker run` of `command` in the repository root.

        It has no name, which another may have: who must find it again asks for its id (`identified`).
        Variables go by name alone: docker takes the values from its own environment, so no value
        appears in a command line, a log or `ps`.
        """
        options = {
            "--rm": True,
            "--init": True,
            "--user": self.user,
            "--workdir": ROOT,
            **CONFINED,
            "--gpus": "all" if self.gpus else None,
            "--network": "host" if self.host_network else None,
        }
        mounts = [("--mount", bind_mount(path)) for path in self.mounts]
        variables = [("--env", each) for each in sorted({*settings, *self.inherited, *ALWAYS})]
        variables.append(("--env", f"PYTHONPATH={PYTHON_PATH}"))
        repeated = chain.from_iterable(mounts + variables)
        return ("docker", "run", *format_flags(options), *FOR_NCCL, *repeated, self.image, *command)

    def mounting(self, *folders: Path) -> Container:
        """The same with mounts of those folders that are not mounted yet."""
        mounts = list(self.mounts)
        for folder in folders:
            if not any(folder.is_relative_to(mount) for mount in mounts):
                mounts.append(folder)
        return replace(self, mounts=tuple(mounts))


def bind_mount(path: Path) -> str:
    """A bind mount at the same path; docker reads the value as CSV, so commas are quoted.

    `--mount`, not `--volume`: it takes colons, and refuses a missing folder instead of making it.
    """
    line = io.StringIO()
    csv.writer(line).writerow(("type=bind", f"source={path}", f"target={path}"))
    return line.getvalue().strip()


def container_user(engine: DockerEngine | None = None) -> str:
    """`--user` for what the container writes to belong to the caller.

    A rootless engine maps the container's root to the caller, and other users to unprivileged ids.
    """
    return "0:0" if engine and engine.rootless else f"{os.getuid()}:{os.getgid()}"


def inherited_names(*also: str, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names of set variables that a container is given by name."""
    names = {*INHERITED, *PROXIES, *also}
    return tuple(
        name for name in sorted(environment) if name in names or name.startswith(INHERITED_PREFIXES)
    )


def add_container_id_file(command: Sequence[str], file: Path) -> tuple[str, ...]:
    """A `docker run` that writes its container's id to a file, which must not be there."""
    return (*command[:2], "--cidfile", str(file), *command[2:])


def data_folders(prefix: Path) -> tuple[Path, ...]:
    """Folders that hold a data set: its own, and those that its files link to."""
    files = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    return tuple(dict.fromkeys((prefix.parent, *(file.resolve().parent for file in files))))


@dataclass(frozen=True)
class ContainerEnd:
    """What the engine says of a container whose client has ended."""

    container: str
    """Its id."""
    engine_answers: bool = True
    runs: bool = False
    """Its client alone has ended."""
    signals: tuple[int, ...] = ()
    """That somebody had the engine send it, such as with `docker kill`."""
    out_of_memory: bool = False


def read_image_versions(container: Container, cache: Path) -> dict[str, str]:
    """Versions inside an image; empty if it does not answer, because a run must not fail for that."""
    try:
        return dict(json.loads(cache.read_text()))
    except (OSError, ValueError):
        pass
    probe = Container(container.image, container.user, gpus=False)
    command = probe.wrap((IMAGE_PYTHON, "-m", "parakit.cluster.container.versions"), ())
    try:
        # The image prints a banner first; the versions are the last line.
        software = dict(
            json.loads(run_program(list(command), PROBE_SECONDS).out.rpartition("\n")[2])
        )
    except ValueError:
        return {}
    cache.parent.mkdir(parents=True, exist_ok=True)
    write_record(cache, software)
    return software


def read_container_id(file: Path) -> str | None:
    """The id that `docker run --cidfile` has written; None before a container was made."""
    try:
        return file.read_text().strip() or None
    except FileNotFoundError:
        return None


def query_container_end(container: str, since: float) -> ContainerEnd:
    """How a container ended, of which nothing but the engine's events of a run is left.

    It began at `since`, in seconds of the epoch, or later.
    """
    state = run_program(["docker", "inspect", "--format", "{{.State.Running}}", container])
    if state.out == "true":
        return ContainerEnd(container, runs=True)
    times = ["--since", f"{since:.0f}", "--until", f"{time.time() + 1:.0f}"]
    only = ["--filter", f"container={container}", "--format", "{{json .}}"]
    events = run_program(["docker", "events", *times, *only])
    if not events.succeeded:
        return ContainerEnd(container, engine_answers=False)
    found = [json.loads(line) for line in events.out.splitlines()]
    killed = (each["Actor"]["Attributes"] for each in found if each["Action"] == "kill")
    signals = tuple(int(each["signal"]) for each in killed)
    return ContainerEnd(
        container, signals=signals, out_of_memory=any(each["Action"] == "oom" for each in found)
    )


def remove_container(file: Path) -> bool:
    """Remove the container whose id a file has, and the file; whether there is none any more."""
    container = read_container_id(file)
    if container is not None:
        answer = run_program(["docker", "rm", "--force", container])
        # A client before 20.10 finds it strange that there is none; with --rm the engine removes it too.
        gone = ("No such container", "is already in progress")
        if not answer.succeeded and not any(said in answer.problem for said in gone):
            return False
    file.unlink(missing_ok=True)
    return True
