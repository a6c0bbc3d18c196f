"""`make stop RUN=…`: end a run from any terminal. `make clean` asks here whether a run is active."""

from __future__ import annotations

import platform
import time
from contextlib import suppress
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
from parakit.config.files import ROOT, relative_to_root
from parakit.formatting.terminal import say
from parakit.launch.checkpoints import choose_grace_seconds
from parakit.launch.flags import EXIT_SIGNAL_HANDLER
from parakit.launch.status import read_job_record, read_recorded_status, read_run_statuses
from parakit.launch.supervise.exit_status import format_outcome
from parakit.launch.supervise.interruption import is_alive
from parakit.logs import describe_newest_runs

STOP_SECONDS = 30.0
"""Longest wait for a run to end. A launcher ends its ranks within 10 s and then writes the status."""

POLL_SECONDS = 0.2
CLOCK_SECONDS = 5.0
"""Largest difference between two readings of a process's start time, in case the clock was set meanwhile."""

_ACTIVE_STATES = ("queued", "running")
"""States of `RunStatus` in which a run has not ended."""


def stop_run(run: str | Path, console: Console) -> int:
    """End a run as Ctrl-C in its terminal would, and print how it ended; return 0.

    Raises:
        LaunchError: The folder holds no run, the run is not running, or it cannot be ended from here.
    """
    run = Path(run).absolute()
    if not records.is_run_folder(run):
        newest_runs = describe_newest_runs(run.parent, ROOT / "runs")
        raise LaunchError(f"RUN={relative_to_root(run)} is no run folder; {newest_runs}.")
    seconds = _longest_stop_seconds(run)
    job_id = _find_active_job(run)
    container = read_container_id(run / CONTAINER_FILE)
    if job_id is not None:
        _cancel_job(run, job_id, seconds)
    elif records.is_running(run / records.LOG_FILE):
        launcher = _find_local_launcher(run)
        # Without a launcher, which has died, the supervisor is already ending the ranks.
        if launcher is not None:
            launcher.terminate()
        _wait_for_end(run, launcher, seconds)
    elif container is not None:
        _remove_orphaned_container(run, container)
    else:
        status = read_recorded_status(run)
        ended = f" at {status.finished_utc}" if status.finished_utc else ""
        raise LaunchError(
            f"{relative_to_root(run)} is not running: it ended '{status.status}'{ended}."
        )
    say(console, format_outcome(run, records.read_status(run)))
    return 0


def _find_active_job(run: Path) -> str | None:
    """Return the id of a run's Slurm job; None without a job, or if the job neither waits nor runs as Slurm reports."""
    job = read_job_record(run)
    if job is None:
        return None
    job_states = query_job_states([job.job_id]) or {}
    state = job_states.get(job.job_id)
    is_active = state is not None and (state.is_waiting or state.is_running)
    return job.job_id if is_active else None


def _remove_orphaned_container(run: Path, container: str) -> None:
    """Remove the container that a run has left because its launcher had lost the engine.

    Raises:
        LaunchError: The engine still does not answer.
    """
    engine = records.read_run(run).runtime
    if not remove_container(run / CONTAINER_FILE, engine):
        raise LaunchError(
            f"The container of {relative_to_root(run)} may still run, and {engine.capitalize()}'s engine does "
            f"not answer; start it, then repeat this, or use '{engine} rm --force {container[:12]}'."
        )


def refuse_running(runs: Path) -> None:
    """Raise if a run in the folder `runs` is training, or waits in Slurm's queue.

    Raises:
        LaunchError: A run is active; the message names all active runs.
    """
    active = []
    for status in read_run_statuses(runs):
        folder = runs / status.run
        if status.state in _ACTIVE_STATES or records.is_running(folder / records.LOG_FILE):
            active.append(relative_to_root(folder))
    if active:
        verb, pronoun = ("is", "it") if len(active) == 1 else ("are", "each")
        raise LaunchError(
            f"{' and '.join(active)} {verb} on; end {pronoun} with 'make stop RUN={active[0]}' or wait "
            "('make status'), then repeat this."
        )
    for log in runs.glob(f".start/*/{records.LOG_FILE}"):
        if records.is_running(log):
            raise LaunchError(
                f"A run writes its starting weights to {relative_to_root(log.parent)}; wait for it or end it "
                "with Ctrl-C where it was started, then repeat this."
            )


def _longest_stop_seconds(run: Path) -> float:
    """Return the longest wait for a run to end: STOP_SECONDS, and the time for a last checkpoint if it saves one.

    A GRACE= of the run that is longer than its saves took is not known here.
    """
    log = run / records.LOG_FILE
    with suppress(OSError, msgspec.DecodeError):
        if EXIT_SIGNAL_HANDLER in records.read_run(run).argv:
            return STOP_SECONDS + choose_grace_seconds(None, log)
    return STOP_SECONDS


def _cancel_job(run: Path, job_id: str, seconds: float) -> None:
    """Cancel a run's Slurm job and wait until it has ended.

    Raises:
        LaunchError: scancel fails, or the job has not ended within `seconds`.
    """
    if not cancel_job(job_id):
        raise LaunchError(
            f"{relative_to_root(run)} is Slurm's job {job_id}, and scancel fails here; end it with 'scancel "
            f"{job_id}' where Slurm's client is."
        )
    deadline = time.monotonic() + seconds
    while _is_active(run):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Slurm has not ended job {job_id} of {relative_to_root(run)} within {seconds:.0f} s; "
                "'make status' follows it."
            )
        time.sleep(POLL_SECONDS)


def _is_active(run: Path) -> bool:
    """Return True if `make status` would show a run as queued or running."""
    return any(
        status.run == run.name and status.state in _ACTIVE_STATES
        for status in read_run_statuses(run.parent)
    )


def _find_local_launcher(run: Path) -> psutil.Process | None:
    """Return the process of the run's launcher; None if it has ended.

    Raises:
        LaunchError: The launcher is on another machine, or the folder does not name it.
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
        is_same = abs(process.create_time() - record.started) < CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return None
    return process if is_same else None


def _wait_for_end(run: Path, launcher: psutil.Process | None, seconds: float) -> None:
    """Wait until the launcher and all ranks have ended.

    Raises:
        LaunchError: They have not ended within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not _has_ended(run, launcher):
        if time.monotonic() > deadline:
            hint = f"; 'kill -9 {launcher.pid}' ends its launcher" if launcher else ""
            raise LaunchError(
                f"{relative_to_root(run)} has not ended within {seconds:.0f} s; 'make status' shows "
                f"when it has{hint}."
            )
        time.sleep(POLL_SECONDS)


def _has_ended(run: Path, launcher: psutil.Process | None) -> bool:
    """Return True if neither the launcher nor a rank of the run lives; None is a launcher that has died before."""
    launcher_lives = launcher is not None and is_alive(launcher)
    return not launcher_lives and not records.is_running(run / records.LOG_FILE)
