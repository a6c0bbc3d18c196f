"""Wrap a command in `docker run` or `podman run`, and ask the engine how a container ended.

`checks/docker.py` and `checks/podman.py` check whether this machine has what a container needs. Podman takes Docker's
options, except for the few that `PodmanContainer` states.
"""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from parakit.artifacts.io import write_record
from parakit.cluster.checks.docker import ContainerEngine, check_container, image_id
from parakit.cluster.checks.podman import check_podman_container
from parakit.cluster.checks.result import CheckResult, run_program
from parakit.config import variables
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.config.flags import format_flags

IMAGE_PYTHON = "python3"
"""The Python of the image, which has torch and Transformer Engine."""

ALWAYS = (variables.LEDGER, variables.RUN_MARK, variables.STACKS, "PYTHONUNBUFFERED")
"""Variables that the launcher sets for a run and does not record as part of its environment."""

INHERITED = ("CUDA_VISIBLE_DEVICES", "WANDB_API_KEY", "WANDB_BASE_URL")
"""Variables of the caller that a container inherits, besides the kit's own settings."""

INHERITED_PREFIXES = (
    *("NCCL_", "UCX_", "FI_", "GLOO_", "NVSHMEM_", "MLX5_", "SHARP_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVTE_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "GLIBC_TUNABLES", "MALLOC_"),
)
"""Prefixes of the caller's variables that change transport, memory or kernels of ranks.

A run that silently lost one of them, in a container or in a Slurm job, would be another run.
"""
_PREFIXES_OF_PATHS_TOO = ("NCCL_", "NVTE_")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
HUB_VARIABLES = ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE")
"""Variables for commands that fetch data. Training needs no token and gets none."""

CONFINED = {
    "--read-only": True,
    "--tmpfs": "/tmp:exec,mode=1777",
    "--cap-drop": "ALL",
    "--security-opt": "no-new-privileges",
}
"""Options that make the image read-only and prevent that a process gains privileges.

Compiled kernels are loaded from /tmp, which is the container's home. It is a tmpfs and removed with the container.
"""

FOR_NCCL = ("--ipc=host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864")
"""Options for NCCL, which moves data between ranks through shared memory and pins pages of it."""

FOR_NCCL_ROOTLESS = ("--ipc=host", "--ulimit", "host")
"""The same for a rootless Podman, which cannot raise a limit: containers get the caller's limits."""


INFINIBAND = Path("/dev/infiniband")
"""Devices of InfiniBand and RoCE, without which NCCL falls back to TCP in silence."""

LABEL = "megatron-parallelism-kit.run"
"""Label of a container with the name of its run folder, as `docker ps --filter label=…` takes it."""

PROBE_SECONDS = 180.0
CONTAINER_FILE = "container.id"
"""The file with the container's id beside the log of a run.

It exists as long as the container does; later only if the container could not be removed.
"""


@dataclass(frozen=True)
class Container:
    """The options of a `docker run`, without the command.

    Subclasses are containers of other programs, and override what differs there.
    """

    program: ClassVar[str] = "docker"
    """The program that starts containers."""
    has_engine: ClassVar[bool] = True
    """True if a container outlives the program that started it, and is ended through its id."""

    image: str
    user: str
    """`uid:gid` of the caller, so that files that the container writes do not belong to root."""
    mounts: tuple[Path, ...] = (ROOT,)
    inherited: tuple[str, ...] = ()
    """Names of the caller's variables that the container inherits."""
    gpus: bool = True
    host_network: bool = False
    """True to use the host's network, which ranks on several machines need to reach each other."""
    groups: tuple[str, ...] = ()
    """Values of `--group-add`. Without them a process in a container is in the group of `user` alone."""

    def wrap(self, command: Sequence[str], settings: Iterable[str]) -> tuple[str, ...]:
        """Return the `docker run` command that executes `command` in the repository root.

        The container gets no name, because another container may have the same name. `add_container_id_file` makes it
        possible to find it. Variables are passed by name only, and docker takes the values from its own environment.
        So no value appears in a command line, a log or `ps`.

        Args:
            command: The command inside of the container.
            settings: Names of further variables that the container inherits.
        """
        needs_infiniband = self.gpus and INFINIBAND.is_dir()
        options = {
            "--rm": True,
            "--init": True,
            "--user": self.user,
            "--workdir": ROOT,
            **CONFINED,
            **self.engine_options(),
            "--network": "host" if self.host_network else None,
            "--device": INFINIBAND if needs_infiniband else None,
        }
        flags = [*format_flags(options), *self.options_for_nccl()]
        for group in self.groups:
            flags += ["--group-add", group]
        for path in self.mounts:
            flags += ["--mount", bind_mount(path)]
        for name in sorted({*settings, *self.inherited, *ALWAYS}):
            flags += ["--env", name]
        flags += ["--env", f"PYTHONPATH={PYTHON_PATH}"]
        return (self.program, "run", *flags, self.image, *command)

    def engine_options(self) -> dict[str, str | bool | None]:
        """Return the options by which containers of this engine get GPUs and belong to the caller."""
        return {"--gpus": "all" if self.gpus else None}

    def options_for_nccl(self) -> tuple[str, ...]:
        """Return the options for shared memory, and for the limits of memory that is locked and of stacks."""
        return FOR_NCCL

    def without_options(self) -> Container:
        """Return a container of the same image and user that gets neither GPUs nor folders besides the kit's."""
        return replace(self, mounts=(ROOT,), inherited=(), gpus=False, host_network=False)

    def check(self, tag: str) -> list[CheckResult]:
        """Check whether this machine can start the container, and whether its image is built.

        Args:
            tag: The image's NGC tag, which the fix of a missing image names.
        """
        return check_container(self.image, tag, self.gpus)

    def image_id(self) -> str | None:
        """Return the id of the container's image; None if the image is not here."""
        return image_id(self.image, self.program)

    def mounting(self, *folders: Path) -> Container:
        """Return the container with mounts of further folders; a folder inside of a mount gets none."""
        mounts = list(self.mounts)
        for folder in folders:
            if not any(folder.is_relative_to(mount) for mount in mounts):
                mounts.append(folder)
        return replace(self, mounts=tuple(mounts))


@dataclass(frozen=True)
class PodmanContainer(Container):
    """The options of a `podman run`, without the command.

    GPUs are named by their CDI specification. SELinux gets no label, with which it would refuse the mounted folders
    and the GPUs. A rootless Podman maps the caller to the same number in the container, so that files belong to the
    caller.
    """

    program: ClassVar[str] = "podman"
    rootless: bool = False

    def engine_options(self) -> dict[str, str | bool | None]:
        """Return the options by which Podman's containers get GPUs and belong to the caller."""
        return {
            "--security-opt=label=disable": True,
            "--userns": "keep-id" if self.rootless else None,
            "--device=nvidia.com/gpu=all": self.gpus,
        }

    def options_for_nccl(self) -> tuple[str, ...]:
        """Return the options of shared memory and limits that Podman may set."""
        return FOR_NCCL_ROOTLESS if self.rootless else FOR_NCCL

    def check(self, tag: str) -> list[CheckResult]:
        """Check whether Podman can start the container, and whether its image is built."""
        return check_podman_container(self.image, tag, self.gpus)


def bind_mount(path: Path) -> str:
    """Return the value of `--mount` that mounts a folder at the same path in a container.

    The engine reads the value as CSV, so a path with commas is quoted. `--mount` accepts colons, and refuses a
    missing folder. `--volume` accepts no colons, and would make the folder.
    """
    line = io.StringIO()
    csv.writer(line).writerow(("type=bind", f"source={path}", f"target={path}"))
    return line.getvalue().strip()


def container_user(engine: ContainerEngine | None = None) -> str:
    """Return the value of `--user` with which files that the container writes belong to the caller.

    A rootless engine maps the container's root to the caller, and other users to unprivileged ids.
    """
    return "0:0" if engine and engine.rootless else f"{os.getuid()}:{os.getgid()}"


def container_groups(
    engine: ContainerEngine | None = None, program: str = "docker"
) -> tuple[str, ...]:
    """Return the values of `--group-add` that keep the caller's supplementary groups in a container.

    A data set may be readable by such a group only. A rootless Podman keeps the groups with the OCI runtime crun; runc
    ignores the value. A rootless Docker cannot map them, so the result is empty.

    Args:
        engine: The engine of the container; None if it does not answer.
        program: The engine's program, docker or podman.
    """
    if engine and engine.rootless:
        return ("keep-groups",) if program == "podman" else ()
    return tuple(str(group) for group in sorted({*os.getgroups()} - {os.getgid()}))


def inherited_names(
    *also: str, environment: Mapping[str, str] = os.environ, in_container: bool = True
) -> tuple[str, ...]:
    """Return the names of the set variables that ranks inherit in a container or on other machines, sorted.

    Args:
        also: Further names to inherit.
        environment: The caller's environment.
        in_container: True to leave out variables that name a folder of this machine, such as CUDA_HOME and
            TRITON_CACHE_DIR, because a container has others.
    """
    names = {*INHERITED, *PROXIES, *also}
    inherited = []
    for name, value in sorted(environment.items()):
        if name in names:
            inherited.append(name)
            continue
        names_folder = value.startswith("/") and not name.startswith(_PREFIXES_OF_PATHS_TOO)
        is_left_out = in_container and names_folder
        if name.startswith(INHERITED_PREFIXES) and not is_left_out:
            inherited.append(name)
    return tuple(inherited)


def add_container_id_file(command: Sequence[str], file: Path) -> tuple[str, ...]:
    """Return a `docker run` with options to write its container's id to a file, which must not exist yet, and to
    label the container with the run folder that the file is in.
    """
    label = f"{LABEL}={file.parent.name}"
    return (*command[:2], "--cidfile", str(file), "--label", label, *command[2:])


def data_folders(prefix: Path) -> tuple[Path, ...]:
    """Return the folders that hold a data set: the folder of its prefix, and those that its files link to."""
    files = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    return tuple(dict.fromkeys((prefix.parent, *(file.resolve().parent for file in files))))


@dataclass(frozen=True)
class ContainerEnd:
    """The end of a container, as Docker's engine reports it after the container's client has ended."""

    container: str
    """The container's id."""
    program: str = "docker"
    """The program of the container's engine, docker or podman."""
    engine_answers: bool = True
    runs: bool = False
    """True if the container still runs and only its client has ended."""
    signals: tuple[int, ...] = ()
    """Signals that the engine sent to the container, for example by `docker kill`."""
    out_of_memory: bool = False


def read_image_versions(container: Container, cache: Path) -> dict[str, str]:
    """Return the versions of the software in an image, by name; empty if the image does not answer.

    Args:
        container: A container of the image.
        cache: The file that stores the versions. The first call writes it, and later calls read it.
    """
    try:
        return dict(json.loads(cache.read_text()))
    except (OSError, ValueError):
        pass
    command = container.without_options().wrap(
        (IMAGE_PYTHON, "-m", "parakit.cluster.container.versions"), ()
    )
    output = run_program(list(command), PROBE_SECONDS).out
    # The image prints a banner before the line with the versions.
    last_line = output.rpartition("\n")[2]
    try:
        software = dict(json.loads(last_line))
    except ValueError:
        return {}
    cache.parent.mkdir(parents=True, exist_ok=True)
    write_record(cache, software)
    return software


def read_container_id(file: Path) -> str | None:
    """Return the container id that `docker run --cidfile` wrote; None if no container was made."""
    try:
        return file.read_text().strip() or None
    except FileNotFoundError:
        return None


def query_container_end(container: str, since: float, program: str = "docker") -> ContainerEnd:
    """Ask the engine how a container ended. For a removed container, the engine's events are read.

    Podman keeps no events if its configuration says so. A container that was killed is then reported without signals.

    Args:
        container: The container's id.
        since: A time before the container began, in seconds of the epoch.
        program: The engine's program, docker or podman.
    """
    state = run_program([program, "inspect", "--format", "{{.State.Running}}", container])
    if state.out == "true":
        return ContainerEnd(container, program, runs=True)
    interval = ["--since", f"{since:.0f}", "--until", f"{time.time() + 1:.0f}"]
    selection = ["--filter", f"container={container}", "--format", "{{json .}}"]
    output = run_program([program, "events", *interval, *selection])
    if not output.succeeded:
        # Podman has no daemon that could be lost.
        return ContainerEnd(container, program, engine_answers=program == "podman")
    events = [json.loads(line) for line in output.out.splitlines()]
    if program == "podman":
        return _end_from_podman_events(container, events)
    return _end_from_docker_events(container, events)


def _end_from_docker_events(container: str, events: Sequence[Mapping[str, Any]]) -> ContainerEnd:
    """Return how a container ended by Docker's events: the signals, and whether memory ran out."""
    signals: list[int] = []
    for event in events:
        if event["Action"] == "kill":
            signals.append(int(event["Actor"]["Attributes"]["signal"]))
    out_of_memory = any(event["Action"] == "oom" for event in events)
    return ContainerEnd(container, "docker", signals=tuple(signals), out_of_memory=out_of_memory)


def _end_from_podman_events(container: str, events: Sequence[Mapping[str, Any]]) -> ContainerEnd:
    """Return how a container ended by Podman's events.

    Podman names no signals. A container that was killed has the signal in its exit code, which is 128 + n.
    """
    statuses = {event["Status"] for event in events}
    signals: list[int] = []
    if "kill" in statuses:
        for event in events:
            exit_code = int(event.get("ContainerExitCode") or 0)
            if exit_code > 128:
                signals.append(exit_code - 128)
    out_of_memory = "oom" in statuses
    return ContainerEnd(container, "podman", signals=tuple(signals), out_of_memory=out_of_memory)


def remove_container(file: Path, program: str = "docker") -> bool:
    """Remove a container and the file with its id; return True if the container no longer exists.

    The file is kept if the container could not be removed.

    Args:
        file: The file with the container's id.
        program: The engine's program, docker or podman.
    """
    container = read_container_id(file)
    if container is not None:
        output = run_program([program, "rm", "--force", container])
        # Docker's client before 20.10 and Podman before 4 report a missing container as an error. Because of --rm
        # the engine may be removing the container at this moment.
        harmless = ("no such container", "is already in progress")
        problem = output.problem.lower()
        if not output.succeeded and not any(text in problem for text in harmless):
            return False
    file.unlink(missing_ok=True)
    return True
