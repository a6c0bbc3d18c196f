"""Containers of a real engine: the Dockerfile built, ranks trained, and what happens to a container."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.docker import engine as engines
from tests.docker.engine import Engine
from tests.faults.runs import Kit, Victim, kill
from tests.patience import PATIENCE, until
from tools.cluster.container.docker import CONTAINER_FILE
from tools.records.run import Status
from tools.spec.files import ROOT

pytestmark = pytest.mark.skipif(bool(engines.missing()), reason=engines.missing() or "none")


@dataclass(frozen=True)
class Built:
    """The kit's image of the installed Megatron, and the kit that trains in it."""

    engine: Engine
    kit: Kit


def checkout(folder: Path) -> str:
    """The wheel's Megatron as a repository with an entry; its commit."""
    found = importlib.util.find_spec("megatron")  # A namespace: nothing is imported.
    assert found is not None
    (wheel,) = found.submodule_search_locations or ()
    shutil.copytree(wheel, folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "examples/gpt3/pretrain_gpt.py", folder)
    # The helpers are the wheel's, compiled.
    (folder / "megatron/core/datasets/Makefile").write_text("all:\n\t@:\n")
    identity = ("-c", "user.name=kit", "-c", "user.email=kit@example.org")
    for words in (("init", "-q"), ("add", "-A", "-f"), (*identity, "commit", "-qm", "the wheel")):
        subprocess.run(("git", *words), cwd=folder, check=True)
    allow = ("config", "uploadpack.allowAnySHA1InWant", "true")
    subprocess.run(("git", *allow), cwd=folder, check=True)
    asked = ("git", "rev-parse", "HEAD")
    return subprocess.run(
        asked, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, small_prefix: Path) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("engine")
    repository = folder / "megatron-lm"
    commit = checkout(repository)
    with engines.running(folder / "docker", repository) as engine:
        versions = folder / "versions.env"
        version = importlib.metadata.version("megatron-core")
        versions.write_text(f'PAIR_T="0-stand-in {commit} {version}"\n')
        data = folder / "data"
        shutil.copytree(small_prefix.parent, data)
        data.chmod(0o555)  # Root in a container without capabilities may not write to it either.
        start = folder / "start"  # A runs folder links it.
        start.mkdir()
        kit = Kit(folder, data / small_prefix.name, start)
        kit.program = (sys.executable, "-m", "tests.docker.launcher", str(versions))
        # Containers of an engine without a bridge have no name of their own to listen at.
        kit.environment |= {
            "DOCKER_HOST": engine.address,
            "RUNTIME": "docker",
            "HOST_NETWORK": "1",
            "SAVE_EVERY": "",
            "ITERS": "400",
        }
        client = {"DOCKER_BUILDKIT": "0", "MEGATRON_URL": repository.as_uri()}
        answer = subprocess.run(
            (*kit.program, "image"),
            cwd=ROOT,
            env={**kit.environment, **client},
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        yield Built(engine, kit)


def begun(built: Built) -> tuple[Victim, str]:
    """A run that trains, and its container's id."""
    words = ("run", "dp2", "gpt2-tiny", "2cpu")
    victim = built.kit.start("dp2", words=words, SAVE_EVERY="")
    victim.wait_for("iteration        2/")
    return victim, (victim.folder / CONTAINER_FILE).read_text().strip()


def none_is_left(victim: Victim) -> None:
    def gone() -> bool:
        named = str(victim.folder.name)
        processes = psutil.process_iter(["cmdline"])
        lines = (" ".join(process.info["cmdline"] or ()) for process in processes)
        return not any("pretrain_gpt" in line and named in line for line in lines)

    until(gone, "ranks are left", PATIENCE)


def test_the_recipe_is_built_and_trains_cpu_ranks_in_a_container(built: Built) -> None:
    words = ("run", "dp2", "gpt2-tiny", "2cpu")
    ended = built.kit.start("dp2", words=words, SAVE_EVERY="", ITERS="3").end()
    assert ended.exit_code == 0, ended.output
    record = json.loads((ended.folder / "run.json").read_text())
    assert record["runtime"] == "docker"
    assert record["software"]["torch"]
    assert not (ended.folder / CONTAINER_FILE).exists()
    assert built.engine.docker("ps", "--all", "--quiet") == ""


@pytest.mark.slow
def test_a_killed_client_is_named_and_its_container_ended(built: Built) -> None:
    victim, container = begun(built)
    (client,) = (p for p in victim.family if p.name() == "docker")
    kill(client)
    ended = victim.end()
    assert ended.status.status is Status.CRASHED
    assert ended.status.reason.startswith("Docker's client ended by SIGKILL after iteration")
    assert container not in built.engine.docker("ps", "--all", "--quiet", "--no-trunc")
    none_is_left(victim)


@pytest.mark.slow
def test_docker_kill_is_named(built: Built) -> None:
    victim, container = begun(built)
    built.engine.docker("kill", container)
    ended = victim.end()
    assert ended.status.status is Status.CRASHED
    assert "The container was ended by SIGKILL through Docker's engine" in ended.status.reason


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_takes_its_container_along(built: Built, number: signal.Signals) -> None:
    victim, _ = begun(built)
    victim.launcher.send_signal(number)
    ended = victim.end()
    assert ended.status.status is Status.INTERRUPTED
    assert built.engine.docker("ps", "--all", "--quiet") == ""
    none_is_left(victim)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["launcher", "supervisor"])
def test_a_killed_launcher_or_supervisor_leaves_no_container(built: Built, who: str) -> None:
    victim, _ = begun(built)
    kill(victim.processes[who])
    victim.end()
    assert built.engine.docker("ps", "--all", "--quiet") == ""
    none_is_left(victim)


@pytest.mark.slow
def test_two_runs_of_one_second_do_not_end_each_other(built: Built, tmp_path: Path) -> None:
    words = ("run", "dp2", "gpt2-tiny", "2cpu")
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    both = [
        built.kit.start("dp2", words=words, SAVE_EVERY="", ITERS="5", RUNS=str(folder))
        for folder in folders
    ]
    assert [victim.end().exit_code for victim in both] == [0, 0]


@pytest.mark.slow
def test_an_engine_that_is_lost_is_named_and_its_ranks_are_ended(built: Built) -> None:
    victim, _ = begun(built)
    os.kill(built.engine.process.pid, signal.SIGKILL)  # The last test: it is not started again.
    ended = victim.end()
    none_is_left(victim)
    assert ended.status.status is Status.CRASHED
    assert "Docker's engine was lost after iteration" in ended.status.reason
