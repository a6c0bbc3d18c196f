"""Docker as the kit uses it: how a command is wrapped, and what is asked of the engine."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.launch.errors import LaunchError
from tools.spec.files import ROOT

PYTHON = "python3"
"""The image's own, which has torch and Transformer Engine."""

ALWAYS = ("KIT_LEDGER", "KIT_STACKS", "PYTHONUNBUFFERED")
"""Set by the launcher for a run but not part of its recorded environment."""

INHERITED = ("CUDA_VISIBLE_DEVICES", "WANDB_API_KEY", "WANDB_BASE_URL")
"""Caller's variables that a container gets too, besides the kit's own settings."""

INHERITED_PREFIXES = ("NCCL_", "NVTE_", "TORCH_NCCL_")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
HUB = ("HF_ENDPOINT", "HF_TOKEN")
"""Only for what fetches data; training is given no token it has no use for."""

CONFINED = (
    *("--read-only", "--tmpfs", "/tmp:exec,mode=1777"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
)
"""Nothing of the image can be changed, and no right gained. Compiled kernels are loaded from /tmp, the
container's home, which is memory and gone with it."""

ENGINE_SECONDS = 20.0


@dataclass(frozen=True)
class Container:
    """Everything of a `docker run` but the command and the container's name."""

    image: str
    user: str
    """`uid:gid` of the caller, so that nothing in the kit ends up as root's."""
    mounts: tuple[Path, ...] = (ROOT,)
    inherited: tuple[str, ...] = ()
    """Names of the caller's variables that are passed on."""
    gpus: bool = True
    host_network: bool = False
    """Only where the caller asked: ranks on several machines must reach each other."""

    def wrap(self, command: Sequence[str], settings: Iterable[str], name: str) -> tuple[str, ...]:
        """A `docker run` of `command` in the repository root.

        Variables go by name alone: docker takes the values from its own environment, so no value
        stands in a command line, a log or `ps`.
        """
        names = sorted({*settings, *self.inherited, *ALWAYS})
        return (
            *("docker", "run", "--rm", "--init", "--name", name),
            *("--user", self.user, "--workdir", str(ROOT)),
            *CONFINED,
            *(("--gpus", "all") if self.gpus else ()),
            *(("--network", "host") if self.host_network else ()),
            # NCCL moves data between ranks through shared memory and pins pages of it.
            *("--ipc=host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
            *(word for path in self.mounts for word in ("--mount", bind(path))),
            *(word for name in names for word in ("--env", name)),
            self.image,
            *command,
        )

    def mounting(self, *folders: Path) -> Container:
        """The same with those folders too that no mount holds yet."""
        mounts = list(self.mounts)
        for folder in folders:
            if not any(folder.is_relative_to(mount) for mount in mounts):
                mounts.append(folder)
        return replace(self, mounts=tuple(mounts))

    def without_gpus(self) -> Container:
        """The same for work that needs none."""
        return replace(self, gpus=False)


@dataclass(frozen=True)
class Engine:
    """What the engine says of itself."""

    runtimes: tuple[str, ...]
    rootless: bool

    @property
    def has_nvidia_runtime(self) -> bool:
        """Whether containers can be given GPUs."""
        return "nvidia" in self.runtimes


def bind(path: Path) -> str:
    """A bind mount at the same path; docker reads the value as CSV, so commas are quoted.

    `--mount`, not `--volume`: it takes colons, and refuses a missing folder instead of making it.
    """
    line = io.StringIO()
    csv.writer(line).writerow(("type=bind", f"source={path}", f"target={path}"))
    return line.getvalue().strip()


def caller(engine: Engine | None = None) -> str:
    """`--user` for what the container writes to belong to the caller.

    A rootless engine maps the container's root to the caller, and every other user to a stranger.
    """
    return "0:0" if engine and engine.rootless else f"{os.getuid()}:{os.getgid()}"


def inherited_names(*also: str, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names of set variables that a container is given by name."""
    names = {*INHERITED, *PROXIES, *also}
    return tuple(
        name for name in sorted(environment) if name in names or name.startswith(INHERITED_PREFIXES)
    )


def container_name(folder: str) -> str:
    """Of a run's container; run folders are named by the second, so their names serve."""
    return f"kit-{Path(folder).name.removeprefix('.')}"


def data_folders(prefix: Path) -> tuple[Path, ...]:
    """Folders that hold a data set: where it is named, and where its files' links lead."""
    files = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    return tuple(dict.fromkeys((prefix.parent, *(file.resolve().parent for file in files))))


def client() -> str:
    """The docker client.

    Raises:
        LaunchError: There is none.
    """
    found = shutil.which("docker")
    if found is None:
        raise LaunchError(
            "Docker is not installed (no 'docker' on PATH); install Docker Engine with the NVIDIA "
            "container toolkit, or set RUNTIME=host."
        )
    return found


def ask_engine() -> Engine:
    """Ask the engine.

    Raises:
        LaunchError: It does not answer; with what it said.
    """
    answer = _ask(
        "info", "--format", '{"runtimes":{{json .Runtimes}},"is":{{json .SecurityOptions}}}'
    )
    try:
        told = json.loads(answer.stdout) if answer.returncode == 0 else {}
    except json.JSONDecodeError:
        told = {}
    if told.get("runtimes") is None:
        reason = (answer.stderr.strip().splitlines() or ["no answer"])[0].rstrip(".?!")
        raise LaunchError(
            f"Docker's engine does not answer ({reason}); start it, see that you may use it "
            "(group 'docker'), or set RUNTIME=host."
        )
    rootless = any("name=rootless" in option for option in told["is"] or ())
    return Engine(tuple(told["runtimes"]), rootless)


def image_id(image: str) -> str | None:
    """The digest of a local image; None if it is not built."""
    answer = _ask("image", "inspect", "--format", "{{.Id}}", image)
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def check_container(image: str, tag: str) -> None:
    """See that a GPU container of the image can be started.

    Raises:
        LaunchError: No client, no engine, no NVIDIA runtime or no image, in this order.
    """
    client()
    if not ask_engine().has_nvidia_runtime:
        raise LaunchError(
            "Docker has no NVIDIA runtime; install the NVIDIA container toolkit and run 'sudo "
            "nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker', or "
            "set RUNTIME=host."
        )
    if image_id(image) is None:
        raise LaunchError(
            f"Image {image} is not built; run 'make image IMAGE={tag}', or set RUNTIME=host."
        )


def remove_container(name: str) -> None:
    """End a container that outlived its client, such as after SIGKILL; quiet if there is none."""
    _ask("rm", "--force", name)


def _ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("docker", *arguments)
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ENGINE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
