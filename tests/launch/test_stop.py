"""`make stop` and `make clean` with a real launcher and a shell for its ranks."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.run import JobRecord, LauncherRecord, Status, StatusRecord
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.launch.stop import refuse_running, stop_run
from parakit.launch.supervise.interruption import is_alive
from tests.cluster.conftest import program
from tests.patience import PATIENCE
from tests.reporting.factory import iteration_line, run_record, write_run

LAUNCHER = """
import sys, time
from pathlib import Path
from parakit.launch.run_folder import record_launcher
from parakit.launch.supervise.exit_status import classify_exit, write_final_status
from parakit.launch.supervise.interruption import Interrupted, interruptible
from parakit.launch.supervise.ranks import RankProcesses
folder = Path(sys.argv[1])
record_launcher(folder)
try:
    with interruptible(), RankProcesses(("sleep", "3600"), {}, folder / "log.txt"):
        print("on", flush=True)
        time.sleep(3600)
except Interrupted:
    write_final_status(folder, classify_exit(folder, None, True), 1.0)
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parakit.launch.stop.STOP_SECONDS", PATIENCE)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as it is before the first process starts."""
    folder = tmp_path / "20260101T000000Z-dp2-gpt2-tiny-2cpu"
    folder.mkdir()
    unfinished = StatusRecord(Status.INCOMPLETE, reason="The launcher did not finish.")
    write_record(folder / records.STATUS_FILE, unfinished)
    (folder / records.LOG_FILE).write_text(iteration_line(7) + "\n")
    return folder


@pytest.fixture
def launcher(run: Path) -> Iterator[psutil.Popen]:
    process = psutil.Popen(
        (sys.executable, "-c", LAUNCHER, str(run)), cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"on\n"
    yield process
    if process.is_running():
        process.kill()
    process.communicate()


def said_by_stop(run: Path) -> str:
    printed = StringIO()
    assert stop_run(run, Console(file=printed, width=500)) == 0
    return printed.getvalue()


def test_a_run_is_stopped_from_elsewhere_and_is_interrupted(
    run: Path, launcher: psutil.Popen
) -> None:
    ranks = launcher.children(recursive=True)
    assert "interrupted after 1 s: " in said_by_stop(run)
    assert records.read_status(run).status is Status.INTERRUPTED
    assert "after iteration 7" in records.read_status(run).reason
    assert not any(is_alive(process) for process in (launcher, *ranks))
    with pytest.raises(LaunchError, match="is not running: it ended 'interrupted' at 20"):
        stop_run(run, Console())


def test_a_run_of_another_machine_is_not_touched(run: Path, launcher: psutil.Popen) -> None:
    path = run / records.LAUNCHER_FILE
    here = msgspec.json.decode(path.read_bytes(), type=LauncherRecord)
    write_record(path, replace(here, host="node-b"))
    with pytest.raises(
        LaunchError, match=f"trained on node-b; .* 'ssh node-b kill {launcher.pid}'"
    ):
        stop_run(run, Console())
    assert is_alive(launcher)


def test_a_process_that_got_the_launchers_number_later_is_not_ended(
    run: Path, launcher: psutil.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parakit.launch.stop.STOP_SECONDS", 0.0)
    path = run / records.LAUNCHER_FILE
    here = msgspec.json.decode(path.read_bytes(), type=LauncherRecord)
    write_record(path, replace(here, started=here.started - 3600))
    with pytest.raises(LaunchError, match="has not ended within"):
        stop_run(run, Console())
    assert is_alive(launcher)


def test_what_is_no_run_is_refused_with_the_runs_beside_it(tmp_path: Path) -> None:
    write_run(tmp_path, run_record("2025-a", "dp2"), "")
    with pytest.raises(LaunchError, match=r"is no run folder; the newest runs of .* are 2025-a\."):
        stop_run(tmp_path / "none", Console())


def test_a_job_is_cancelled_in_slurm(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    program(folder, "squeue", f"[ -f {folder}/gone ] || echo '12|PENDING|Priority'")
    program(folder, "sacct", "echo '12|CANCELLED by 0|None'")
    program(folder, "scancel", f'[ "$*" = 12 ] && touch {folder}/gone')
    write_record(run / records.JOB_FILE, JobRecord("12", 2, "2026-01-01T00:00:00Z"))
    with pytest.raises(LaunchError, match="20260101T000000Z-dp2-gpt2-tiny-2cpu is on; end it with"):
        refuse_running(run.parent)
    assert "interrupted" in said_by_stop(run)
    assert records.read_status(run).reason == "Job 12 was cancelled in Slurm; see slurm.txt."
    refuse_running(run.parent)


def test_runs_that_are_on_are_not_cleaned_away(run: Path, launcher: psutil.Popen) -> None:
    with pytest.raises(LaunchError) as refused:
        refuse_running(run.parent)
    assert str(refused.value) == (
        f"{run} is on; end it with 'make stop RUN={run}' or wait ('make status'), then repeat this."
    )
    stop_run(run, Console())
    refuse_running(run.parent)


def test_starting_weights_that_are_being_written_are_not_cleaned_away(
    run: Path, launcher: psutil.Popen
) -> None:
    runs = run.parent / "runs"
    (runs / ".start").mkdir(parents=True)
    run.rename(runs / ".start" / "gpt2-tiny-0.partial-here-1")
    with pytest.raises(LaunchError, match=r"writes its starting weights to .*partial-here-1; wait"):
        refuse_running(runs)
