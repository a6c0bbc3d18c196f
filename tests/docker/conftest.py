"""The kit's image on an engine of the tests' own, for the tests of a file."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from parakit.cluster.container.docker import CONTAINER_FILE
from parakit.config.files import ROOT
from tests.docker import engine as engines
from tests.docker import podman as podmans
from tests.docker.engine import Engine
from tests.docker.podman import Podman
from tests.faults.runs import Ended, Kit, Victim
from tests.patience import PATIENCE, until

TARGET = ("run", "dp2", "gpt2-tiny", "2cpu")


@dataclass(frozen=True)
class Built:
    """The kit's image of the installed Megatron, and the kit that trains in it."""

    engine: Engine | Podman
    kit: Kit

    def begin(self, line: str = "iteration        2/", **variables: str) -> Victim:
        """A run that has logged a line."""
        victim = self.kit.start("dp2", arguments=TARGET, **{"SAVE_EVERY": "", **variables})
        victim.wait_for(line)
        return victim

    def end(self, victim: Victim) -> Ended:
        """As `Victim.end`; no container and none of its processes is left."""
        ended = victim.end()
        until(lambda: not inside(victim), "ranks are left", PATIENCE)
        assert self.engine.docker("ps", "--all", "--quiet") == ""
        assert not (victim.folder / CONTAINER_FILE).exists()
        return ended


def checkout(folder: Path) -> str:
    """The wheel's Megatron as a repository with an entry; its commit."""
    specification = importlib.util.find_spec("megatron")  # A namespace: nothing is imported.
    assert specification is not None
    (wheel,) = specification.submodule_search_locations or ()
    shutil.copytree(wheel, folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "examples/gpt3/pretrain_gpt.py", folder)
    # The helpers are the wheel's, compiled.
    (folder / "megatron/core/datasets/Makefile").write_text("all:\n\t@:\n")
    identity = ("-c", "user.name=kit", "-c", "user.email=kit@example.org")
    for git_arguments in (
        ("init", "-q"),
        ("add", "-A", "-f"),
        (*identity, "commit", "-qm", "the wheel"),
    ):
        subprocess.run(("git", *git_arguments), cwd=folder, check=True)
    allow = ("config", "uploadpack.allowAnySHA1InWant", "true")
    subprocess.run(("git", *allow), cwd=folder, check=True)
    asked = ("git", "rev-parse", "HEAD")
    return subprocess.run(
        asked, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def inside(victim: Victim) -> dict[str, psutil.Process]:
    """Its container's processes that live, as `Victim.processes` calls them."""
    processes_by_name: dict[str, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline", "name", "environ", "status"]):
        command_line = process.info["cmdline"] or []
        name = process.info["name"]
        if (
            name.startswith(("docker", "podman", "conmon", "catatonit"))
            or process.info["status"] == "zombie"
        ):
            continue
        if "parakit.launch.supervise.supervisor" in command_line:  # It has its container's words.
            continue
        if (
            any(victim.folder.name in word for word in command_line)
            and "megatron_patches" in command_line
        ):
            rank = (process.info["environ"] or {}).get("RANK")
            processes_by_name.setdefault("torchrun" if rank is None else f"rank {rank}", process)
    return processes_by_name


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, small_prefix: Path) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("engine")
    repository = folder / "megatron-lm"
    commit = checkout(repository)
    with engines.running(folder / "docker", repository) as engine:
        # Containers of an engine without a bridge have no name of their own to listen at.
        variables = {"DOCKER_HOST": engine.address, "RUNTIME": "docker", "HOST_NETWORK": "1"}
        yield Built(engine, build_kit(folder, commit, small_prefix, variables))


@pytest.fixture(scope="module")
def built_by_podman(
    tmp_path_factory: pytest.TempPathFactory, small_prefix: Path
) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("podman")
    repository = folder / "megatron-lm"
    commit = checkout(repository)
    with podmans.running(folder / "podman", repository) as podman:
        variables = {**podman.environment, "RUNTIME": "podman", "HOST_NETWORK": "1"}
        yield Built(podman, build_kit(folder, commit, small_prefix, variables))


@pytest.fixture(scope="module")
def built_by_rootless_podman(small_prefix: Path) -> Iterator[Built]:
    user = podmans.find_user()
    # pytest's own folder lets nobody else through.
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    repository = folder / "megatron-lm"
    commit = checkout(repository)
    with podmans.running(folder / "podman", repository, user=user) as podman:
        variables = {**podman.environment, "RUNTIME": "podman", "HOST_NETWORK": "1"}
        yield Built(podman, build_kit(folder, commit, small_prefix, variables, podman))
    shutil.rmtree(folder)


def build_kit(
    folder: Path,
    commit: str,
    small_prefix: Path,
    variables: dict[str, str],
    podman: Podman | None = None,
) -> Kit:
    """Build the kit's image with `folder / "megatron-lm"` and the variables' RUNTIME=; return the kit that uses it.

    The kit is the user's of a rootless Podman.
    """
    versions = folder / "versions.env"
    version = importlib.metadata.version("megatron-core")
    versions.write_text(f'PAIR_T="0-stand-in {commit} {version}"\n')
    data = folder / "data"
    shutil.copytree(small_prefix.parent, data)
    data.chmod(0o555)  # Root in a container without capabilities may not write to it either.
    start = folder / "start"  # A runs folder links it.
    start.mkdir()
    kit = Kit(folder, data / small_prefix.name, start)
    prefix = podman.prefix if podman else ()
    kit.program = (*prefix, sys.executable, "-m", "tests.docker.launcher", str(versions))
    if podman and podman.user:
        owner = f"{podman.user.pw_uid}:{podman.user.pw_gid}"
        paths = [str(path) for path in folder.iterdir() if path != podman.folder]
        subprocess.run(("chown", owner, str(folder)), check=True)
        subprocess.run(("chown", "-R", owner, *paths), check=True)
    kit.environment |= {**variables, "SAVE_EVERY": "", "ITERS": "400"}
    client = {"DOCKER_BUILDKIT": "0", "MEGATRON_URL": (folder / "megatron-lm").as_uri()}
    answer = subprocess.run(
        (*kit.program, "image"),
        cwd=ROOT,
        env={**kit.environment, **client},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return kit
