"""Containers of a real Podman: the Dockerfile built, ranks trained, and what happens to a container."""

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from parakit.artifacts.run import LOG_FILE, Status
from parakit.cluster.container.docker import CONTAINER_FILE
from parakit.config.files import ROOT
from tests.docker import podman as podmans
from tests.docker.conftest import TARGET, Built, inside
from tests.faults.runs import kill
from tests.faults.test_resources import groups_are_enforced, memory_group
from tests.patience import OF_A_RUN, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(podmans.missing()), reason=podmans.missing() or "none"),
]


def find_client(processes: list[psutil.Process]) -> psutil.Process:
    """Return the `podman run` among the processes of a run."""
    (client,) = (process for process in processes if process.name() == "podman")
    return client


def test_podman_builds_the_recipe_and_trains_cpu_ranks(built_by_podman: Built) -> None:
    victim = built_by_podman.kit.start("dp2", arguments=TARGET, SAVE_EVERY="", ITERS="3")
    ended = built_by_podman.end(victim)
    assert ended.exit_code == 0, ended.output
    record = json.loads((ended.folder / "run.json").read_text())
    assert record["runtime"] == "podman"
    assert record["command"][:2] == ["podman", "run"]
    assert record["software"]["torch"]


def test_a_killed_client_of_podman_is_named_and_its_container_ended(built_by_podman: Built) -> None:
    victim = built_by_podman.begin()
    kill(find_client(victim.family))
    status = built_by_podman.end(victim).status
    assert status.status is Status.CRASHED
    assert status.reason.startswith("Podman's client ended by SIGKILL after iteration")


def test_podman_kill_is_named(built_by_podman: Built) -> None:
    victim = built_by_podman.begin()
    built_by_podman.engine.docker("kill", (victim.folder / CONTAINER_FILE).read_text())
    status = built_by_podman.end(victim).status
    assert status.status is Status.CRASHED
    assert "The container was ended by SIGKILL through Podman" in status.reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_takes_its_podman_container_along(
    built_by_podman: Built, number: signal.Signals
) -> None:
    victim = built_by_podman.begin()
    victim.launcher.send_signal(number)
    assert built_by_podman.end(victim).status.status is Status.INTERRUPTED


def test_make_stop_ends_a_run_in_podman(built_by_podman: Built) -> None:
    victim = built_by_podman.begin()
    command = (*built_by_podman.kit.program, "stop", str(victim.folder))
    subprocess.run(command, cwd=ROOT, check=True)
    assert built_by_podman.end(victim).status.status is Status.INTERRUPTED


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        ("launcher", "The launcher was killed after iteration"),
        ("supervisor", "The supervisor of torchrun was killed by SIGKILL"),
    ],
)
def test_a_killed_launcher_or_supervisor_leaves_no_podman_container(
    built_by_podman: Built, who: str, reason: str
) -> None:
    victim = built_by_podman.begin()
    kill(victim.processes[who])
    assert built_by_podman.end(victim).status.reason.startswith(reason)


@pytest.mark.parametrize(
    ("who", "reason", "rank"),
    [
        ("rank 1", "Rank 1 was killed by SIGKILL", 1),
        ("torchrun", "torchrun was killed by SIGKILL", None),
    ],
)
def test_a_process_that_is_killed_in_podmans_container_is_named(
    built_by_podman: Built, who: str, reason: str, rank: int | None
) -> None:
    victim = built_by_podman.begin()
    kill(inside(victim)[who])
    status = built_by_podman.end(victim).status
    assert (status.status, status.rank) == (Status.CRASHED, rank)
    assert status.reason.startswith(reason)


def test_a_rank_in_podmans_container_that_may_have_no_more_memory_is_named(
    built_by_podman: Built,
) -> None:
    victim = built_by_podman.begin(
        "initializing torch distributed", MICRO_BATCH="4", GLOBAL_BATCH="8"
    )
    # The process is looked up before the line that the limit waits for. The first iteration allocates memory that
    # later iterations reuse, so a limit that comes after it refuses nothing.
    rank = inside(victim)["rank 1"]
    log = victim.folder / LOG_FILE
    until(
        lambda: "before the start of training step" in log.read_text(), "no step starts", OF_A_RUN
    )
    rank.rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))
    status = built_by_podman.end(victim).status
    assert (status.status, status.rank) == (Status.OUT_OF_MEMORY, 1), status


def test_a_rank_in_podmans_container_that_the_kernel_kills_for_memory_is_named(
    built_by_podman: Built,
) -> None:
    if not groups_are_enforced():
        pytest.skip("this kernel ends nothing that exceeds a memory control group")
    victim = built_by_podman.begin("initializing torch distributed")
    with memory_group() as group:
        (group / "memory.limit_in_bytes").write_text(str(4 << 20))
        (group / "cgroup.procs").write_text(str(inside(victim)["rank 1"].pid))
        status = built_by_podman.end(victim).status
    assert status.status is Status.OUT_OF_MEMORY, status


def test_two_runs_of_one_second_in_podman_do_not_end_each_other(
    built_by_podman: Built, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    both = [
        built_by_podman.kit.start(
            "dp2", arguments=TARGET, SAVE_EVERY="", ITERS="5", RUNS=str(folder)
        )
        for folder in folders
    ]
    assert [victim.end().exit_code for victim in both] == [0, 0]
    assert built_by_podman.engine.docker("ps", "--all", "--quiet") == ""


def test_podman_stop_interrupts_a_run(built_by_podman: Built) -> None:
    victim = built_by_podman.begin()
    built_by_podman.engine.docker("stop", (victim.folder / CONTAINER_FILE).read_text())
    status = built_by_podman.end(victim).status
    assert status.status is Status.INTERRUPTED
    assert "SIGTERM" in status.reason


def test_a_killed_monitor_of_podmans_container_ends_its_run(built_by_podman: Built) -> None:
    victim = built_by_podman.begin()
    container = (victim.folder / CONTAINER_FILE).read_text()
    asked = ("inspect", "--format", "{{.State.ConmonPid}}", container)
    kill(psutil.Process(int(built_by_podman.engine.docker(*asked))))
    status = built_by_podman.end(victim).status
    assert status.status is Status.CRASHED
    assert status.reason.startswith("Podman's client ended by code 127 after iteration")
