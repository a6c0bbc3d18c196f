"""Ends of a container of Podman, whose processes are the supervisor's; a script stands in for Podman."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from parakit.artifacts.run import LOG_FILE, Status
from parakit.cluster import CONTAINER_FILE
from parakit.launch.supervise import interruption
from parakit.launch.supervise.exit_status import (
    DiskWatch,
    classify_exit,
    raise_if_container_ended,
)
from parakit.launch.supervise.hang import EndedRunError
from parakit.launch.supervise.interruption import is_alive
from parakit.launch.supervise.ranks import RankProcesses
from tests.patience import until

pytestmark = pytest.mark.ranks

PODMAN = """#!/bin/bash
cd {folder} || exit 125
case $1 in
run) # The client waits until its container's monitor is no process any more; a zombie is one.
  ( setsid bash -c 'RANK=0 sleep 600 & echo $! >rank; wait; rm rank; cat died >>events' & echo $! >monitor )
  until [[ -s rank ]]; do sleep 0.02; done
  echo abc >container.id
  while kill -0 "$(<monitor)"; do sleep 0.02; done
  [[ -e rank ]] && exit 127 || exit 137 ;;
inspect) [[ -e rank ]] && echo true || exit 125 ;;
kill) cat kill >>events; kill -9 "$(<rank)" ;;
events) cat events ;;
rm) [[ ! -e rank ]] || kill -9 "$(<rank)" || true ;; # It may have ended since the test.
esac
"""
"""A Podman of one container. The monitor of its container is an orphan, as Podman's is."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, and on PATH a Podman that has its only container there."""
    monkeypatch.setattr(interruption, "GRACE_SECONDS", 0.5)
    program = tmp_path / "bin" / "podman"
    program.parent.mkdir()
    program.write_text(PODMAN.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    # As podman 4.3.1 prints its events.
    (tmp_path / "kill").write_text(json.dumps({"Status": "kill"}) + "\n")
    (tmp_path / "died").write_text(json.dumps({"Status": "died", "ContainerExitCode": 137}) + "\n")
    return tmp_path


@contextmanager
def container(folder: Path) -> Iterator[RankProcesses]:
    """Run a container with rank 0 in a `with` block, after which neither rank nor monitor is left."""
    with RankProcesses(("podman", "run", "image"), {}, folder / LOG_FILE, "podman") as ranks:
        until((folder / CONTAINER_FILE).exists, "the container does not start")
        processes = [read_process(folder, name) for name in ("rank", "monitor")]
        yield ranks
    until(lambda: not any(map(is_alive, processes)), "processes are left")
    assert not (folder / CONTAINER_FILE).exists()


def read_process(folder: Path, name: str) -> psutil.Process:
    """Return the process whose id a file has."""
    return psutil.Process(int((folder / name).read_text()))


def find_client() -> psutil.Process:
    """Return the process of `podman run`."""
    clients = []
    for process in psutil.Process().children(recursive=True):
        # A program that the stand-in has run may end meanwhile.
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[2:3] == ["run"]:
                clients.append(process)
    (client,) = clients
    return client


def wait_for_exit_code(ranks: RankProcesses) -> int:
    return until(ranks.exit_code, "the client does not end") or 0


def test_a_killed_client_is_named_while_its_container_runs_on(folder: Path) -> None:
    with container(folder) as ranks:
        find_client().kill()
        exit_code = wait_for_exit_code(ranks)
        assert is_alive(read_process(folder, "rank")), "the launcher ends it"
        with pytest.raises(
            EndedRunError, match=r"^Podman's client ended by SIGKILL; its container "
        ):
            raise_if_container_ended(folder, ranks, exit_code)


def test_a_client_ends_with_the_monitor_of_its_container(folder: Path) -> None:
    with container(folder) as ranks:
        read_process(folder, "monitor").kill()
        exit_code = wait_for_exit_code(ranks)
        with pytest.raises(
            EndedRunError, match=r"^Podman's client ended by code 127; its container "
        ):
            raise_if_container_ended(folder, ranks, exit_code)


def test_a_client_that_could_not_write_is_blamed_on_a_disk_that_has_room_again(
    folder: Path,
) -> None:
    disk = DiskWatch(folder)
    with container(folder) as ranks:
        disk.exhausted_resource = "space"
        read_process(folder, "monitor").kill()
        exit_code = wait_for_exit_code(ranks)
        raise_if_container_ended(folder, ranks, exit_code, disk)
    status = classify_exit(folder, exit_code, False, lacked=disk.exhausted_resource)
    assert status.status is Status.CRASHED
    assert status.reason.startswith("No space was left on the disk of ")


def test_a_client_that_a_signal_ended_is_not_blamed_on_the_disk(folder: Path) -> None:
    disk = DiskWatch(folder)
    disk.exhausted_resource = "space"
    with container(folder) as ranks:
        find_client().kill()
        exit_code = wait_for_exit_code(ranks)
        with pytest.raises(EndedRunError, match=r"^Podman's client ended by SIGKILL; "):
            raise_if_container_ended(folder, ranks, exit_code, disk)


def test_podman_kill_is_named_without_an_engine(folder: Path) -> None:
    with container(folder) as ranks:
        subprocess.run(("podman", "kill", "abc"), check=True)
        exit_code = wait_for_exit_code(ranks)
        with pytest.raises(
            EndedRunError, match=r"was ended by SIGKILL through Podman\.$"
        ) as caught:
            raise_if_container_ended(folder, ranks, exit_code)
    assert caught.value.status is Status.CRASHED


def test_a_podman_that_keeps_no_events_has_lost_no_engine(folder: Path) -> None:
    with container(folder) as ranks:
        read_process(folder, "rank").kill()
        exit_code = wait_for_exit_code(ranks)
        (folder / "events").unlink()
        raise_if_container_ended(folder, ranks, exit_code)
    assert classify_exit(folder, exit_code, False).reason.startswith(
        "torchrun was killed by SIGKILL"
    )
