"""The supervisor alone, with shells for torchrun and ranks: who dies, and who is left."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord
from parakit.config.files import ROOT
from parakit.launch.supervise.interruption import is_alive
from tests.patience import PATIENCE, until

TORCHRUN = "RANK=0 sleep 3600 & trap '' TERM; RANK=1 sleep 3600 & wait; wait"
"""Longer than anybody waits here: nobody ends by himself."""
LAUNCHER = """
import sys, time
from pathlib import Path
from parakit.launch.supervise.ranks import RankProcesses
folder = Path(sys.argv[1])
with RankProcesses(("bash", "-c", sys.argv[2]), {}, folder / "log.txt") as ranks:
    while ranks.exit_code() is None:
        time.sleep(0.05)
    print(ranks.exit_code(), flush=True)
"""


class Family:
    """A launcher, its supervisor, a torchrun and its ranks."""

    def __init__(self, folder: Path, torchrun: str = TORCHRUN) -> None:
        self.folder = folder
        unfinished = StatusRecord(Status.INCOMPLETE, reason="The launcher did not finish.")
        write_record(folder / records.STATUS_FILE, unfinished)
        command = (sys.executable, "-c", LAUNCHER, str(folder), torchrun)
        self.launcher = psutil.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        until(lambda: len(self.launcher.children(recursive=True)) == 4, "not all have started")
        self.supervisor, self.torchrun, *self.ranks = self.launcher.children(recursive=True)
        assert len(self.ranks) == 2

    def wait_until_gone(self) -> None:
        everyone = (self.supervisor, self.torchrun, *self.ranks)
        until(lambda: not any(is_alive(process) for process in everyone), "processes are left")


def stop_a_rank_and_kill_the_launcher(family: Family) -> None:
    family.ranks[0].suspend()
    family.launcher.kill()


FAULTS: dict[str, Callable[[Family], None]] = {
    "launcher": lambda family: family.launcher.kill(),
    "launcher of a stopped rank": stop_a_rank_and_kill_the_launcher,
    "torchrun": lambda family: family.torchrun.kill(),
    "supervisor": lambda family: family.supervisor.kill(),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Family]]:
    """One for each fault, which has struck it; they come to their ends side by side."""
    families = {name: Family(tmp_path_factory.mktemp("run")) for name in FAULTS}
    assert all(records.is_running(family.folder / records.LOG_FILE) for family in families.values())
    for name, strike in FAULTS.items():
        strike(families[name])
    yield families
    for family in families.values():
        if family.launcher.is_running():
            family.launcher.kill()
        family.launcher.communicate()


def test_no_process_outlives_a_launcher_that_was_killed_and_the_status_says_so(
    families: dict[str, Family],
) -> None:
    family = families["launcher"]
    family.wait_until_gone()
    status = records.read_status(family.folder)
    assert status.status is Status.INTERRUPTED
    assert "The launcher was killed" in status.reason
    assert not records.is_running(family.folder / records.LOG_FILE)


def test_a_stopped_rank_does_not_outlive_its_launcher_either(families: dict[str, Family]) -> None:
    families["launcher of a stopped rank"].wait_until_gone()


def test_no_process_outlives_torchrun_and_the_launcher_learns_what_ended_it(
    families: dict[str, Family],
) -> None:
    family = families["torchrun"]
    family.wait_until_gone()
    output, _ = family.launcher.communicate(timeout=PATIENCE)
    assert int(output) == 128 + signal.SIGKILL


def test_no_process_outlives_the_supervisor(families: dict[str, Family]) -> None:
    family = families["supervisor"]
    family.launcher.wait(timeout=PATIENCE)
    family.wait_until_gone()


def test_an_exit_code_goes_through_and_a_finished_run_keeps_no_lock(tmp_path: Path) -> None:
    command = (sys.executable, "-c", LAUNCHER, str(tmp_path), "exit 7")
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=PATIENCE)
    assert answer.stdout == b"7\n"
    assert not records.is_running(tmp_path / records.LOG_FILE)
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]
