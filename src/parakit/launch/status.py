"""`make status`: list every run as it stands, and record what Slurm reports about jobs that it ended."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord
from parakit.cluster import ENDINGS, OUTPUT_FILE, STOPPED_BY_SLURM, JobState, query_job_states
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.terminal import say
from parakit.formatting.units import clock, gib
from parakit.launch.progress import LogFollower
from parakit.launch.supervise.interruption import Interrupted
from parakit.logs import Iteration, diagnose_log, find_run_folders, make_printable, read_samples

TAIL_BYTES = 256 << 10
SHOWN_RANKS = 8
REDRAW_SECONDS = 2.0
SCREEN_MARGIN = 5
"""Lines of the screen that heading, rule and prompt take."""
NUM_RECENT_ITERATIONS = 20
"""Iterations whose median time estimates the time that is left."""


@dataclass(frozen=True)
class RunStatus:
    """A run as it stands now: state, progress, loss and memory."""

    run: str
    state: str
    """`queued`, `running`, or the status with which the run ended."""
    iteration: int | None = None
    iterations: int | None = None
    loss: float | None = None
    left_seconds: float | None = None
    note: str = ""
    memory_bytes: tuple[float, ...] = ()
    """Newest memory sample per rank, of its device or its process; empty unless the run is running."""


def _format_memory(status: RunStatus) -> str | None:
    """Return the GiB per rank, at most SHOWN_RANKS numbers with the highest last; None without samples."""
    ranks = [gib(bytes_, 2) for bytes_ in status.memory_bytes]
    if len(ranks) > SHOWN_RANKS:
        ranks = [*ranks[: SHOWN_RANKS - 1], "…", f"{gib(max(status.memory_bytes), 2)} most"]
    return " ".join(ranks) or None


def _format_iteration(status: RunStatus) -> str | None:
    """Return the newest iteration and their planned number, such as `12/100`; None before the first iteration."""
    if status.iteration is None:
        return None
    return f"{status.iteration}/{status.iterations or '?'}"


_NOTE = Column[RunStatus](
    "note", lambda seen: make_printable(seen.note), right=False, wraps=True, rank=5
)
_COLUMNS = (
    Column[RunStatus]("run", lambda seen: make_printable(seen.run), right=False),
    Column[RunStatus]("state", lambda seen: seen.state, right=False, rank=1),
    Column[RunStatus]("iteration", _format_iteration, rank=2),
    Column[RunStatus]("loss", lambda seen: seen.loss and f"{seen.loss:.4f}", rank=3),
    Column[RunStatus](
        "left",
        lambda seen: None if seen.left_seconds is None else clock(seen.left_seconds),
        rank=4,
    ),
    Column[RunStatus]("GiB by rank", _format_memory, rank=6),
    _NOTE,
)


def watch_runs(runs: Path, console: Console) -> None:
    """Redraw the table of runs until none is running; Ctrl-C leaves the table as it stands.

    Off a terminal, and if nothing runs, the table is printed once.
    """
    rows = read_run_statuses(runs)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            try:
                while any(status.state == "running" for status in rows):
                    # A terminal can be redrawn only without scrolling, so only the newest runs are shown.
                    newest = tuple(rows)[-max(1, console.height - SCREEN_MARGIN) :]
                    table = Table(_COLUMNS, newest).fitting(console.width)
                    live.update(rich_table(table, console.width), refresh=True)
                    time.sleep(REDRAW_SECONDS)
                    rows = read_run_statuses(runs)
            except Interrupted:
                pass
    print_status(rows, runs, console)


def print_status(rows: Sequence[RunStatus], runs: Path, console: Console) -> None:
    """Print a row per run, the newest last. Names are in full, as `RUN=` takes them."""
    if not rows:
        text = f"No runs in {runs}; 'make demo' or a train-… target makes some."
        console.print(text, markup=False)
        return
    table = Table(_COLUMNS, tuple(rows)).fitting(console.width)
    console.print(rich_table(table, console.width), crop=False)
    if _NOTE not in table.columns:
        for status in rows:
            if status.note:
                line = make_printable(f"{status.run}: {status.note}")
                say(console, line)


def read_run_statuses(runs: Path) -> list[RunStatus]:
    """Return the status of every run in the folder `runs`.

    Jobs of this user that Slurm ended get the status that Slurm reports; it is written to their folder.
    """
    folders = find_run_folders(runs)
    jobs: dict[Path, records.JobRecord] = {}
    for folder in folders:
        job = read_job_record(folder)
        if job is not None:
            jobs[folder] = job
    job_states = query_job_states([job.job_id for job in jobs.values()])
    return [_read_status(folder, jobs.get(folder), job_states) for folder in folders]


def read_job_record(folder: Path) -> records.JobRecord | None:
    """Return the record in `job.json`; None if the file is missing or cannot be read."""
    try:
        return msgspec.json.decode((folder / records.JOB_FILE).read_bytes(), type=records.JobRecord)
    except (OSError, msgspec.DecodeError):
        return None


@dataclass(frozen=True)
class _SlurmJob:
    """The Slurm job of a run, with what Slurm reports about the job now."""

    record: records.JobRecord
    state: JobState | None
    """None if Slurm does not list the job, or does not answer."""
    slurm_answers: bool

    @property
    def has_left_slurm(self) -> bool:
        """True if Slurm answers, and the job neither waits nor runs."""
        is_active = self.state is not None and (self.state.is_waiting or self.state.is_running)
        return self.slurm_answers and not is_active


def _read_status(
    folder: Path, record: records.JobRecord | None, job_states: dict[str, JobState] | None
) -> RunStatus:
    """Return one run as it stands now.

    `record` is that of its Slurm job, if it has one. `job_states` are Slurm's answers; None if Slurm does not
    answer.
    """
    status = read_recorded_status(folder)
    job = None
    if record is not None:
        job_state = job_states.get(record.job_id) if job_states else None
        job = _SlurmJob(record, job_state, slurm_answers=job_states is not None)
        # Slurm lists only the caller's jobs. A job of another user may still run when it is not listed.
        if job.has_left_slurm and folder.stat().st_uid == os.getuid():
            status = _settle_status(folder, record, job_state, status)
    state, note = _describe_state(folder, job, status)
    iterations = _read_planned_iterations(folder)
    recent = _last_iterations(folder / records.LOG_FILE)
    run_status = RunStatus(run=folder.name, state=state, iterations=iterations, note=note)
    if recent:
        newest = recent[-1]
        run_status = replace(run_status, iteration=newest.iteration, loss=newest.lm_loss)
    if state == "running":
        run_status = replace(
            run_status,
            left_seconds=_estimate_left_seconds(recent, iterations),
            memory_bytes=_read_newest_memory(folder),
        )
    return run_status


def _read_planned_iterations(folder: Path) -> int | None:
    """Return the number of iterations that a run was started with; None if its record cannot be read."""
    try:
        return records.read_run(folder).exit_interval
    except (OSError, msgspec.DecodeError):
        return None


def _describe_state(folder: Path, job: _SlurmJob | None, status: StatusRecord) -> tuple[str, str]:
    """Return the state and the note that the table shows for a run; `job` is None for a run without Slurm."""
    job_name = f"job {job.record.job_id}" if job else ""
    job_state = job.state if job else None
    if job_state is not None:
        if job_state.is_waiting:
            return "queued", f"{job_name}: {job_state.reason}"
        if job_state.is_running:
            return "running", job_name
    elif _is_incomplete(status):
        if records.looks_alive(folder):
            return "running", job_name
        if job and not job.slurm_answers:
            return status.status.value, f"{job_name}: Slurm does not answer."
    note = "" if status.status is Status.OK else status.reason
    return status.status.value, note


def _estimate_left_seconds(recent: Sequence[Iteration], iterations: int | None) -> float | None:
    """Return the seconds to the last iteration at the median recent time; None if a number is unknown."""
    times_ms = [iteration.elapsed_ms for iteration in recent if iteration.elapsed_ms is not None]
    if not times_ms or iterations is None:
        return None
    return max(0, iterations - recent[-1].iteration) * statistics.median(times_ms) / 1000


def _read_newest_memory(folder: Path) -> tuple[float, ...]:
    """Return the newest memory sample of each rank that has one."""
    newest: list[float] = []
    for series in read_samples(folder / records.SAMPLES_FILE).series:
        samples = [sample for sample in series.memory_bytes if sample is not None]
        if samples:
            newest.append(samples[-1])
    return tuple(newest)


def _settle_status(
    folder: Path, job: records.JobRecord, state: JobState | None, status: StatusRecord
) -> StatusRecord:
    """Return the status of a Slurm job, corrected by Slurm's answer, and write it to the run folder if it changed.

    It is corrected if the launcher left no final status or was asked to stop.
    """
    if _is_incomplete(status) and not records.looks_alive(folder):
        settled = replace(_explain_end(folder, job, state), finished_utc=records.utc_now())
    elif status.status is Status.INTERRUPTED and state and state.state in STOPPED_BY_SLURM:
        settled = replace(status, reason=_job_sentence(job, ENDINGS[state.state][1]))
    else:
        return status
    if settled != status:
        write_record(folder / records.STATUS_FILE, settled)
    return settled


def _explain_end(folder: Path, job: records.JobRecord, state: JobState | None) -> StatusRecord:
    """Return the status of a job that ended without its launcher writing one, from Slurm or else from the log."""
    if state is not None:
        status_kind, ending = ENDINGS.get(
            state.state, (Status.CRASHED, f"ended {state.state} in Slurm")
        )
        return StatusRecord(status_kind, None, _job_sentence(job, ending))
    if not any((folder / name).exists() for name in (records.LOG_FILE, OUTPUT_FILE)):
        # Slurm has no record of an array task that was cancelled while it waited.
        reason = f"Job {job.job_id} left Slurm's queue before it began."
        return StatusRecord(Status.INTERRUPTED, None, reason)
    status = diagnose_log(folder / records.LOG_FILE, None, interrupted=False)
    reason = f"Job {job.job_id} is gone from Slurm; its launcher left no word. {status.reason}"
    return replace(status, reason=reason.strip())


def _job_sentence(job: records.JobRecord, ending: str) -> str:
    """Return the sentence that says how a job ended and where its output is."""
    return f"Job {job.job_id} {ending}; see {OUTPUT_FILE}."


def _is_incomplete(status: StatusRecord) -> bool:
    """Return True if the launcher has not written a final status."""
    return status.status is Status.INCOMPLETE


def read_recorded_status(folder: Path) -> StatusRecord:
    """Return the status in `status.json`; `incomplete` if the file is missing or cannot be read."""
    try:
        return records.read_status(folder)
    except (OSError, msgspec.DecodeError):
        return StatusRecord(Status.INCOMPLETE, None, "status.json cannot be read.")


def _last_iterations(log: Path) -> Sequence[Iteration]:
    """Return the last iterations in a log, at most NUM_RECENT_ITERATIONS; empty without a log."""
    try:
        follower = LogFollower(log, max(0, log.stat().st_size - TAIL_BYTES))
    except OSError:
        return ()
    with closing(follower):
        return follower.new_iterations()[-NUM_RECENT_ITERATIONS:]
