"""How a run ended, from its log and from what the machine reports, and the status in its folder."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

from parakit.accounting import collect_rank_records
from parakit.artifacts import run as records
from parakit.artifacts.checkpoints import find_checkpoints
from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord
from parakit.cluster import free_files
from parakit.config.files import relative_to_root
from parakit.launch.background import BackgroundThread
from parakit.launch.supervise.hang import (
    EndedRunError,
    find_awaited_ranks,
    find_mismatched_call,
    remove_empty_stacks,
)
from parakit.launch.supervise.ranks import RankProcesses
from parakit.logs import NCCL_TIMEOUT, describe_log_end, diagnose_log, find_first_error, scrape_log

RESERVE_FILE = ".reserve"
RESERVE_BYTES = 1 << 20
"""Held while a run trains and given back at its end: its status can be written on a full disk too."""

LOOK_SECONDS = 0.2
_FULL_BYTES = 64 << 10
_SIGKILL = 137


def reserve_room(folder: Path) -> None:
    """Hold room for the status that is written at the end.

    Raises:
        OSError: There is none.
    """
    with (folder / RESERVE_FILE).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)


def count_memory_kills() -> int | None:
    """How often the kernel has killed a process for memory since it started; None: it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


class DiskWatch(BackgroundThread):
    """What a disk lacked at some time while the `with` block ran: at the end some may be free again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.exhausted_resource = ""
        super().__init__()

    def _watch(self) -> None:
        while not self.exhausted_resource and not self.done.wait(LOOK_SECONDS):
            self.exhausted_resource = find_exhausted_resource(self._folder)


def find_exhausted_resource(folder: Path) -> str:
    """What is used up on a folder's disk: `space` or `inode`; empty if neither, or it does not say."""
    try:
        if shutil.disk_usage(folder).free < _FULL_BYTES:
            return "space"
        return "inode" if free_files(str(folder)) == 0 else ""
    except OSError:
        return ""


def classify_exit(
    folder: Path,
    exit_code: int | None,
    interrupted: bool,
    kills_before: int | None = None,
    lacked: str = "",
) -> StatusRecord:
    """How a run ended.

    Args:
        folder: The run folder.
        exit_code: The supervisor's; 128 + n if signal n ended torchrun itself, -n if the supervisor.
        interrupted: Whether the launcher was asked to stop.
        kills_before: What `memory_kills` said before it started.
        lacked: What `DiskWatch` saw of the folder's disk while it ran.
    """
    status = diagnose_log(folder / records.LOG_FILE, exit_code, interrupted)
    if exit_code is not None and exit_code < 0 and not interrupted:
        # The supervisor gives torchrun's signals as 128 + n. Its own end stops torchrun by SIGTERM.
        by = signal.Signals(-exit_code).name
        reason = (
            f"The supervisor of torchrun was killed by {by}{_after(folder)}; all ranks were ended."
        )
        return replace(status, status=Status.CRASHED, reason=reason, rank=None)
    if status.status in (Status.OK, Status.INTERRUPTED):
        return status
    found, kind, lacks = None, "", find_exhausted_resource(folder)
    if NCCL_TIMEOUT in status.reason:
        found, kind = find_awaited_ranks(folder), records.HANG_REASON_PREFIX
    elif exit_code:
        found = find_mismatched_call(folder / records.STACKS_FOLDER, status.rank)
        found = None if lacks else found  # On a full disk ranks leave no calls, or not all of them.
    if found:
        rank = found.culprits[0] if found.culprits else None
        return replace(status, reason=f"{kind}{found.sentence} {status.reason}", rank=rank)
    # What was full for a moment is blamed only for a log that could not say what happened.
    if not lacks and lacked and find_first_error(scrape_log(folder / records.LOG_FILE)) is None:
        lacks = lacked
    if lacks:
        reason = f"No {lacks} was left on the disk of {folder.name}; {_begin(status.reason)}"
        return replace(status, status=Status.CRASHED, reason=reason)
    if exit_code == _SIGKILL:
        # What ranks log when they lose torchrun is not the cause.
        reason = f"torchrun was killed by SIGKILL{_after(folder)}; its ranks were ended."
        status = replace(status, status=Status.CRASHED, reason=reason, rank=None)
    now = count_memory_kills()
    if "SIGKILL" in status.reason and None not in (now, kills_before) and now != kills_before:
        who = "torchrun" if status.rank is None else f"Rank {status.rank}"
        reason = f"{who} was killed by the kernel, which had run out of memory{_after(folder)}."
        return replace(status, status=Status.OUT_OF_MEMORY, reason=reason)
    return status


def raise_if_container_ended(folder: Path, ranks: RankProcesses, exit_code: int) -> None:
    """Name what ended a container, where that is no process in it; its processes are ended.

    Args:
        folder: Of its log.
        ranks: Its processes.
        exit_code: The supervisor's.

    Raises:
        EndedRunError: The engine or its client was lost, or somebody had the engine end it.
    """
    # A supervisor that was killed has a negative code, and its client is gone because of that.
    end = ranks.read_container_end() if exit_code > 0 else None
    if end is None or (
        end.runs and find_exhausted_resource(folder)
    ):  # The client has nowhere to write.
        return
    after, seen = _after(folder), bool(ranks.find_by_rank())
    ranks.stop()
    status = Status.CRASHED
    if not end.engine_answers:
        left = f"its ranks may train on, and 'docker rm --force {end.container[:12]}' ends them"
        rest = "its ranks were ended" if seen else left
        reason = f"Docker's engine was lost{after}; {rest}."
    elif end.runs:
        by = signal.Signals(exit_code - 128).name if exit_code > 128 else f"code {exit_code}"
        reason = f"Docker's client ended by {by}{after}; its container was ended."
    elif end.out_of_memory:
        status = Status.OUT_OF_MEMORY
        reason = f"The container was killed by the kernel, which had no more memory for it{after}."
    elif end.signals and exit_code > 128:
        by = signal.Signals(end.signals[-1]).name
        stopped = signal.SIGKILL not in end.signals or signal.SIGTERM in end.signals
        status = Status.INTERRUPTED if stopped else status
        reason = f"The container was ended by {by} through Docker's engine{after}."
    else:
        return
    raise EndedRunError(reason, status)


def make_killed_launcher_status(folder: Path) -> StatusRecord:
    """The status of a run whose launcher can no longer write one."""
    reason = f"The launcher was killed{_after(folder)}; all ranks were ended."
    return StatusRecord(Status.INTERRUPTED, None, reason)


def write_final_status(folder: Path, status: StatusRecord, wall_seconds: float) -> StatusRecord:
    """Write how a run ended and what its ranks' ledgers hold; return what was written.

    Raises:
        OSError: The disk is full in spite of the room that was held.
    """
    status = replace(
        status,
        finished_utc=records.utc_now(),
        wall_seconds=round(wall_seconds, 1),
    )
    (folder / RESERVE_FILE).unlink(missing_ok=True)
    if (folder / records.STATUS_FILE).exists():
        write_record(folder / records.STATUS_FILE, status)
    # Ranks that are asked to end leave what they did, and NCCL some of those that end by themselves.
    if status.status in (Status.OK, Status.INTERRUPTED):
        shutil.rmtree(folder / records.STACKS_FOLDER, ignore_errors=True)
    remove_empty_stacks(folder / records.STACKS_FOLDER)
    collect_rank_records(folder)
    return status


def format_outcome(folder: Path, status: StatusRecord) -> str:
    """How a run ended and where to look, a line; of one that saved and did not end well also how it goes
    on."""
    seconds = f"{status.wall_seconds:.0f} s" if status.wall_seconds is not None else "?"
    reason = f": {status.reason}" if status.status is not Status.OK and status.reason else ""
    line = f"{status.status} after {seconds}{reason} → {relative_to_root(folder)}"
    if status.status is Status.OK:
        return line
    stored = find_checkpoints(folder / records.CHECKPOINTS_FOLDER)  # Newest first.
    saved = next((one.iteration for one in stored if one.is_finished), None)
    if saved is None:
        return line
    return f"{line}\n'make resume RUN={relative_to_root(folder)}' goes on from what was saved at {saved}."


def _after(folder: Path) -> str:
    log = scrape_log(folder / records.LOG_FILE)
    return describe_log_end(log) if log.iterations else ""  # They may be in another node's.


def _begin(reason: str) -> str:
    return reason[:1].lower() + reason[1:] if reason else "the log does not say more."
