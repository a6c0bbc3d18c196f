"""`make stop RUN=…` ends a run from any terminal; `make clean` asks here whether one is on."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import msgspec
import psutil
from rich.console import Console

from parakit.artifacts import run as records
from parakit.artifacts.run import LauncherRecord
from parakit.cluster import (
    CONTAINER_FILE,
    cancel_job,
    query_job_states,
    read_container_id,
    remove_container,
)
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.formatting.terminal import say
from parakit.launch.status import read_job_record, read_recorded_status, read_run_statuses
from parakit.launch.supervise.exit_status import format_outcome
from parakit.launch.supervise.interruption import is_alive

STOP_SECONDS = 30.0
"""A launcher that is asked to stop ends its ranks within 10 s, and then writes the status."""

POLL_SECONDS = 0.2
CLOCK_SECONDS = 5.0
"""Two readings of one process's start may differ so much, where the clock was set meanwhile."""


def stop_run(run: str | Path, console: Console) -> int:
    """End a run as Ctrl-C in its own terminal would; 0 once it has ended.

    Raises:
        LaunchError: It is no run, is not running, or runs where it cannot be ended from here.
    """
    run = Path(run).absolute()
    if not records.is_run_folder(run):
        raise LaunchError(f"RUN={run} is no run folder; 'make status' shows them.")
    job = read_job_record(run)
    state = (query_job_states([job.job_id]) or {}).get(job.job_id) if job else None
    if job and state and (state.is_waiting or state.is_running):
        _cancel(run, job.job_id)
    elif records.is_running(run / records.LOG_FILE):
        launcher = _launcher_here(run)
        if launcher is not None:  # Else it died, and the supervisor is ending the ranks already.
            launcher.terminate()
        _wait_for_the_end(run, launcher)
    elif left := read_container_id(run / CONTAINER_FILE):
        if not remove_container(run / CONTAINER_FILE):  # Its launcher had lost Docker's engine.
            raise LaunchError(
                f"The container of {relative_to_root(run)} may still run, and Docker's engine does not "
                f"answer; start it, then repeat this, or use 'docker rm --force {left[:12]}'."
            )
    else:
        status = read_recorded_status(run)
        ended = f" at {status.finished_utc}" if status.finished_utc else ""
        raise LaunchError(
            f"{relative_to_root(run)} is not running: it ended '{status.status}'{ended}."
        )
    say(console, format_outcome(run, records.read_status(run)))
    return 0


def refuse_running(runs: Path) -> None:
    """Refuse while a run in this folder is on, or waits in Slurm's queue.

    Raises:
        LaunchError: At least one is; each is named.
    """
    active = [
        relative_to_root(runs / seen.run)
        for seen in read_run_statuses(runs)
        if seen.state in ("queued", "running")
        or records.is_running(runs / seen.run / records.LOG_FILE)
    ]
    if active:
        names, each = " and ".join(active), "it" if len(active) == 1 else "each"
        verb = "is on" if len(active) == 1 else "are on"
        raise LaunchError(
            f"{names} {verb}; end {each} with 'make stop RUN={active[0]}' or wait ('make status'), "
            "then repeat this."
        )
    for log in runs.glob(f".start/*/{records.LOG_FILE}"):
        if records.is_running(log):
            raise LaunchError(
                f"A run writes its starting weights to {relative_to_root(log.parent)}; wait for it or end it "
                "with Ctrl-C where it was started, then repeat this."
            )


def _cancel(run: Path, job_id: str) -> None:
    if not cancel_job(job_id):
        raise LaunchError(
            f"{relative_to_root(run)} is Slurm's job {job_id}, and scancel fails here; end it with 'scancel "
            f"{job_id}' where Slurm's client is."
        )
    deadline = time.monotonic() + STOP_SECONDS
    on = ("queued", "running")
    while any(seen.run == run.name and seen.state in on for seen in read_run_statuses(run.parent)):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Slurm has not ended job {job_id} of {relative_to_root(run)} within {STOP_SECONDS:.0f} s; "
                "'make status' follows it."
            )
        time.sleep(POLL_SECONDS)


def _launcher_here(run: Path) -> psutil.Process | None:
    """The run's launcher; None if it is gone.

    Raises:
        LaunchError: It is on another machine, or the folder does not say where.
    """
    try:
        path = run / records.LAUNCHER_FILE
        record = msgspec.json.decode(path.read_bytes(), type=LauncherRecord)
    except (OSError, msgspec.DecodeError):
        raise LaunchError(
            f"{relative_to_root(run)} does not say which process trains it ({records.LAUNCHER_FILE}); end it "
            "with Ctrl-C where it was started."
        ) from None
    if record.host != platform.node():
        raise LaunchError(
            f"{relative_to_root(run)} is trained on {record.host}; run 'make stop' there, or 'ssh "
            f"{record.host} kill {record.process}'."
        )
    try:
        process = psutil.Process(record.process)
        same = abs(process.create_time() - record.started) < CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def _wait_for_the_end(run: Path, launcher: psutil.Process | None) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while (launcher and is_alive(launcher)) or records.is_running(run / records.LOG_FILE):
        if time.monotonic() > deadline:
            harder = f"; 'kill -9 {launcher.pid}' ends its launcher" if launcher else ""
            raise LaunchError(
                f"{relative_to_root(run)} has not ended within {STOP_SECONDS:.0f} s, 'make status' follows "
                f"it{harder}."
            )
        time.sleep(POLL_SECONDS)
