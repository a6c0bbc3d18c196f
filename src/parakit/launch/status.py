"""`make status`: every run, waiting, running or ended; and what Slurm knows put into the records."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import closing, suppress
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
"""Lines for heading, rule and prompt."""
NUM_RECENT_ITERATIONS = 20
"""Iterations whose median says how long the rest will take."""


@dataclass(frozen=True)
class RunStatus:
    """One run as it stands now."""

    run: str
    state: str
    """`queued`, `running`, or how it ended."""
    iteration: int | None = None
    iterations: int | None = None
    loss: float | None = None
    left_seconds: float | None = None
    note: str = ""
    memory_bytes: tuple[float, ...] = ()
    """The newest reading of each rank's device, or process, while it runs."""


def _memory_of(seen: RunStatus) -> str | None:
    ranks = [gib(bytes_, 2) for bytes_ in seen.memory_bytes]
    if len(ranks) > SHOWN_RANKS:
        ranks = [*ranks[: SHOWN_RANKS - 1], "…", f"{gib(max(seen.memory_bytes), 2)} most"]
    return " ".join(ranks) or None


_NOTE = Column[RunStatus](
    "note", lambda seen: make_printable(seen.note), right=False, wraps=True, rank=5
)
_COLUMNS = (
    Column[RunStatus]("run", lambda seen: make_printable(seen.run), right=False),
    Column[RunStatus]("state", lambda seen: seen.state, right=False, rank=1),
    Column[RunStatus](
        "iteration",
        lambda seen: (
            None if seen.iteration is None else f"{seen.iteration}/{seen.iterations or '?'}"
        ),
        rank=2,
    ),
    Column[RunStatus]("loss", lambda seen: seen.loss and f"{seen.loss:.4f}", rank=3),
    Column[RunStatus](
        "left",
        lambda seen: None if seen.left_seconds is None else clock(seen.left_seconds),
        rank=4,
    ),
    Column[RunStatus]("GiB by rank", _memory_of, rank=6),
    _NOTE,
)


def watch_runs(runs: Path, console: Console) -> None:
    """Redraw the table of runs in a terminal until none is running; Ctrl-C leaves it as it stands.

    Elsewhere, and where nothing runs, it is printed once.
    """
    rows = read_run_statuses(runs)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            try:
                while any(seen.state == "running" for seen in rows):
                    # The newest that fit, so that the terminal can be redrawn without scrolling.
                    newest = tuple(rows)[-max(1, console.height - SCREEN_MARGIN) :]
                    table = Table(_COLUMNS, newest).fitting(console.width)
                    live.update(rich_table(table, console.width), refresh=True)
                    time.sleep(REDRAW_SECONDS)
                    rows = read_run_statuses(runs)
            except Interrupted:
                pass
    print_status(rows, runs, console)


def print_status(rows: Sequence[RunStatus], runs: Path, console: Console) -> None:
    """Print a row for every run, the newest last; names are whole, as `RUN=` takes them."""
    if not rows:
        text = f"No runs in {runs}; 'make demo' or a train-… target makes some."
        console.print(text, markup=False)
        return
    table = Table(_COLUMNS, tuple(rows)).fitting(console.width)
    console.print(rich_table(table, console.width), crop=False)
    if _NOTE not in table.columns:
        for seen in rows:
            if seen.note:
                line = make_printable(f"{seen.run}: {seen.note}")
                say(console, line)


def read_run_statuses(runs: Path) -> list[RunStatus]:
    """Every run as it stands; the caller's jobs that Slurm ended get the status that it reports."""
    folders = find_run_folders(runs)
    jobs = {folder: job for folder in folders if (job := read_job_record(folder)) is not None}
    states = query_job_states([job.job_id for job in jobs.values()])
    return [_see(folder, jobs.get(folder), states) for folder in folders]


def read_job_record(folder: Path) -> records.JobRecord | None:
    """`job.json`; None where there is none that can be read."""
    try:
        return msgspec.json.decode((folder / records.JOB_FILE).read_bytes(), type=records.JobRecord)
    except (OSError, msgspec.DecodeError):
        return None


def _see(
    folder: Path, job: records.JobRecord | None, states: dict[str, JobState] | None
) -> RunStatus:
    status = read_recorded_status(folder)
    state = states.get(job.job_id) if job and states else None
    last = _last_iterations(folder / records.LOG_FILE)
    wanted = None
    with suppress(OSError, msgspec.DecodeError):
        wanted = records.read_run(folder).exit_interval
    # Slurm lists the caller's jobs only: of others' it says nothing by leaving them out.
    in_hand = state is not None and (state.is_waiting or state.is_running)
    if job and states is not None and not in_hand and folder.stat().st_uid == os.getuid():
        status = _settled(folder, job, state, status)
    note = f"job {job.job_id}" if job else ""
    if state and state.is_waiting:
        shown, note = "queued", f"{note}: {state.reason}"
    elif in_hand or (state is None and records.looks_alive(folder) and _open(status)):
        shown = "running"
    elif job and states is None and _open(status):
        shown, note = status.status.value, f"{note}: Slurm does not answer."
    else:
        shown, note = status.status.value, status.reason if status.status is not Status.OK else ""
    newest, left = last[-1] if last else None, None
    memory: tuple[float, ...] = ()
    if shown == "running":
        times = [one.elapsed_ms for one in last if one.elapsed_ms is not None]
        if newest and times and wanted is not None:
            left = max(0, wanted - newest.iteration) * statistics.median(times) / 1000
        ranks = read_samples(folder / records.SAMPLES_FILE).series
        known = ([b for b in one.memory_bytes if b is not None] for one in ranks)
        memory = tuple(readings[-1] for readings in known if readings)
    return RunStatus(
        run=folder.name,
        state=shown,
        iteration=newest.iteration if newest else None,
        iterations=wanted,
        loss=newest.lm_loss if newest else None,
        left_seconds=left,
        note=note,
        memory_bytes=memory,
    )


def _settled(
    folder: Path, job: records.JobRecord, state: JobState | None, status: StatusRecord
) -> StatusRecord:
    """Its status, from Slurm where the launcher left none or was only asked to stop."""
    if _open(status) and not records.looks_alive(folder):
        settled = replace(_how_it_ended(folder, job, state), finished_utc=records.utc_now())
    elif status.status is Status.INTERRUPTED and state and state.state in STOPPED_BY_SLURM:
        settled = replace(status, reason=_reason(job, ENDINGS[state.state][1]))
    else:
        return status
    if settled != status:
        write_record(folder / records.STATUS_FILE, settled)
    return settled


def _how_it_ended(folder: Path, job: records.JobRecord, state: JobState | None) -> StatusRecord:
    if state is not None:
        kind, how = ENDINGS.get(state.state, (Status.CRASHED, f"ended {state.state} in Slurm"))
        return StatusRecord(kind, None, _reason(job, how))
    if not any((folder / name).exists() for name in (records.LOG_FILE, OUTPUT_FILE)):
        # Of an array's element that was cancelled while it waited Slurm keeps nothing.
        reason = f"Job {job.job_id} left Slurm's queue before it began."
        return StatusRecord(Status.INTERRUPTED, None, reason)
    status = diagnose_log(folder / records.LOG_FILE, None, interrupted=False)
    reason = f"Job {job.job_id} is gone from Slurm; its launcher left no word. {status.reason}"
    return replace(status, reason=reason.strip())


def _reason(job: records.JobRecord, how: str) -> str:
    return f"Job {job.job_id} {how}; see {OUTPUT_FILE}."


def _open(status: StatusRecord) -> bool:
    return status.status is Status.INCOMPLETE


def read_recorded_status(folder: Path) -> StatusRecord:
    """`status.json`; `incomplete` where there is none that can be read."""
    try:
        return records.read_status(folder)
    except (OSError, msgspec.DecodeError):
        return StatusRecord(Status.INCOMPLETE, None, "status.json cannot be read.")


def _last_iterations(log: Path) -> Sequence[Iteration]:
    try:
        follower = LogFollower(log, max(0, log.stat().st_size - TAIL_BYTES))
    except OSError:
        return ()
    with closing(follower):
        return follower.new_iterations()[-NUM_RECENT_ITERATIONS:]
