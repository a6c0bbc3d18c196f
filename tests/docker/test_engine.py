"""Containers of a real engine: the Dockerfile built, ranks trained, and what happens to a container."""

import json
import os
import signal
from pathlib import Path

import pytest

from parakit.artifacts.run import Status
from parakit.cluster.container.docker import CONTAINER_FILE
from tests.docker import engine as engines
from tests.docker.conftest import TARGET, Built, inside
from tests.faults.runs import kill
from tests.patience import PATIENCE, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(engines.missing()), reason=engines.missing() or "none"),
]


def test_the_recipe_is_built_and_trains_cpu_ranks_in_a_container(built: Built) -> None:
    ended = built.end(built.kit.start("dp2", arguments=TARGET, SAVE_EVERY="", ITERS="3"))
    assert ended.exit_code == 0, ended.output
    record = json.loads((ended.folder / "run.json").read_text())
    assert record["runtime"] == "docker"
    assert record["software"]["torch"]


@pytest.mark.slow
def test_a_killed_client_is_named_and_its_container_ended(built: Built) -> None:
    victim = built.begin()
    (client,) = (p for p in victim.family if p.name() == "docker")
    kill(client)
    ended = built.end(victim)
    assert ended.status.status is Status.CRASHED
    assert ended.status.reason.startswith("Docker's client ended by SIGKILL after iteration")


@pytest.mark.slow
def test_docker_kill_is_named(built: Built) -> None:
    victim = built.begin()
    built.engine.docker("kill", (victim.folder / CONTAINER_FILE).read_text())
    ended = built.end(victim)
    assert ended.status.status is Status.CRASHED
    assert "The container was ended by SIGKILL through Docker's engine" in ended.status.reason


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_takes_its_container_along(built: Built, number: signal.Signals) -> None:
    victim = built.begin()
    victim.launcher.send_signal(number)
    ended = built.end(victim)
    assert ended.status.status is Status.INTERRUPTED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "reason"),
    [
        ("launcher", "The launcher was killed after iteration"),
        ("supervisor", "The supervisor of torchrun was killed by SIGKILL"),
    ],
)
def test_a_killed_launcher_or_supervisor_leaves_no_container(
    built: Built, who: str, reason: str
) -> None:
    victim = built.begin()
    kill(victim.processes[who])
    assert built.end(victim).status.reason.startswith(reason)


@pytest.mark.slow
def test_two_runs_of_one_second_do_not_end_each_other(built: Built, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    both = [
        built.kit.start("dp2", arguments=TARGET, SAVE_EVERY="", ITERS="5", RUNS=str(folder))
        for folder in folders
    ]
    assert [victim.end().exit_code for victim in both] == [0, 0]


@pytest.mark.slow
def test_an_engine_that_is_lost_is_named_and_its_ranks_are_ended(built: Built) -> None:
    victim = built.begin()
    os.kill(built.engine.process.pid, signal.SIGKILL)  # The last test: it is not started again.
    ended = victim.end()
    until(lambda: not inside(victim), "ranks are left", PATIENCE)
    assert ended.status.status is Status.CRASHED
    assert "Docker's engine was lost after iteration" in ended.status.reason
