import os
import shlex
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from parakit.launch.supervise import interruption
from parakit.launch.supervise import ranks as ranks_module
from parakit.launch.supervise.interruption import is_alive
from parakit.launch.supervise.ranks import RankProcesses
from tests.patience import until

pytestmark = pytest.mark.ranks

STUBBORN = "trap '' TERM; RANK=0 bash -c \"trap '' TERM; while :; do sleep 0.1; done\" & wait; wait"


def wait_for(ranks: RankProcesses, rank: int) -> psutil.Process:
    return until(lambda: ranks.find_by_rank().get(rank), f"no rank {rank}")


def test_the_exit_code_and_both_streams_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with RankProcesses(
        ("bash", "-c", "echo out; echo $WORD >&2; exit 3"), {"WORD": "err"}, log
    ) as ranks:
        until(lambda: ranks.exit_code() is not None, "no exit code")
        assert ranks.exit_code() == 3
    assert log.read_text() == "out\nerr\n"


def test_ranks_are_found_by_their_environment(tmp_path: Path) -> None:
    command = ("bash", "-c", "RANK=1 sleep 600 & RANK=0 sleep 600 & wait")
    with RankProcesses(command, {}, tmp_path / "log.txt") as ranks:
        assert wait_for(ranks, 0).pid != wait_for(ranks, 1).pid


def test_a_rank_that_the_launcher_itself_has_is_nobodys_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    command = ("bash", "-c", "RANK=1 sleep 600 & wait")
    with RankProcesses(command, {}, tmp_path / "log.txt") as ranks:
        wait_for(ranks, 1)
        assert set(ranks.find_by_rank()) == {1}


def test_processes_that_ignore_sigterm_are_ended_by_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruption, "GRACE_SECONDS", 0.5)
    with RankProcesses(("bash", "-c", STUBBORN), {}, tmp_path / "log.txt") as ranks:
        rank = wait_for(ranks, 0)
    until(lambda: not is_alive(rank), "the rank lives")


SAVING = """
import os, signal, sys, time
saved, sleeping = sys.argv[1], True
def save(number, frame):
    time.sleep(3)
    open(saved, "w").write("whole")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("grace_seconds", [60.0, None])
def test_a_rank_that_saves_longer_than_the_usual_time_to_stop_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_seconds: float | None
) -> None:
    monkeypatch.setattr(interruption, "GRACE_SECONDS", 0.5)
    saved, log = tmp_path / "saved", tmp_path / "log.txt"
    rank = shlex.join((sys.executable, "-c", SAVING, str(saved)))
    with RankProcesses(("bash", "-c", f"RANK=0 {rank} & wait"), {}, log) as ranks:
        until(lambda: "ready" in log.read_text(), "the rank does not start")
        if grace_seconds:
            ranks.let_save(grace_seconds)
    assert saved.exists() == (grace_seconds is not None)


def test_slurms_announcement_to_all_processes_ends_no_rank(tmp_path: Path) -> None:
    with RankProcesses(("bash", "-c", "RANK=0 sleep 600 & wait"), {}, tmp_path / "log") as ranks:
        rank = wait_for(ranks, 0)
        for process in (rank, rank.parent()):
            process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        assert is_alive(rank)


def test_a_supervisor_whose_environment_cannot_be_seen_yet_is_ended_by_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruption, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(ranks_module, "_read_environment", lambda process: {})
    with RankProcesses(("sleep", "600"), {}, tmp_path / "log.txt") as ranks:
        assert ranks.exit_code() is None
    # Not 0, as after the whole sleep: a signal ended it.
    assert ranks.exit_code() in (-signal.SIGTERM, -signal.SIGKILL)


def test_a_rank_orphaned_by_torchruns_death_is_ended_before_the_end_is_reported(
    tmp_path: Path,
) -> None:
    with RankProcesses(
        ("bash", "-c", "RANK=0 sleep 600 & wait"), {}, tmp_path / "log.txt"
    ) as ranks:
        rank = wait_for(ranks, 0)
        os.kill(rank.ppid(), signal.SIGKILL)
        until(lambda: ranks.exit_code() is not None, "no exit code")
        assert not is_alive(rank)
