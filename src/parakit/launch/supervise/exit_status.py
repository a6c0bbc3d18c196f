"""Decide how a run ended, from its log and from what the machine reports, and write the status to its folder."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

from parakit.accounting import collect_rank_records
from parakit.artifacts import run as records
from parakit.artifacts.checkpoints import find_checkpoints
from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord
from parakit.cluster import ContainerEnd, free_files
from parakit.config.files import relative_to_root
from parakit.formatting.units import gib
from parakit.hang import find_slow_rank
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
"""Bytes that are held while a run trains and freed at its end, so that its status fits on a full disk."""

LOOK_SECONDS = 0.2
_FULL_BYTES = 64 << 10
_SIGNAL_BASE = 128
"""Exit code of a process that a signal ended, less the number of the signal."""
_SIGKILL = _SIGNAL_BASE + signal.SIGKILL


def reserve_room(folder: Path) -> None:
    """Hold room on the disk for the status that is written at the end.

    Raises:
        OSError: The disk does not have the room.
    """
    with (folder / RESERVE_FILE).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)


def count_memory_kills() -> int | None:
    """Return how many processes the kernel has killed for memory since it started; None if it does not report it."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def read_address_limit() -> int | None:
    """Return the bytes of addresses that this process and its children may have (`ulimit -v`); None if unlimited."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes


class DiskWatch(BackgroundThread):
    """A thread that notes whether a disk ran out of space or inodes during a `with` block.

    At the end of the block they may be free again. Whoever frees room on the disk during the block calls `look` before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.exhausted_resource = ""
        """The first result of `find_exhausted_resource` that was not empty; empty if there was none."""
        super().__init__()

    def look(self) -> None:
        """Note whether the disk has run out of space or inodes now."""
        self.exhausted_resource = self.exhausted_resource or find_exhausted_resource(self._folder)

    def _watch(self) -> None:
        while not self.exhausted_resource and not self.done.wait(LOOK_SECONDS):
            self.look()


def find_exhausted_resource(folder: Path) -> str:
    """Return `space` or `inode`, whichever is used up on a folder's disk; empty if neither is, or if the disk
    cannot be asked.
    """
    try:
        if shutil.disk_usage(folder).free < _FULL_BYTES:
            return "space"
        if free_files(str(folder)) == 0:
            return "inode"
    except OSError:
        pass
    return ""


def classify_exit(
    folder: Path,
    exit_code: int | None,
    interrupted: bool,
    kills_before: int | None = None,
    lacked: str = "",
) -> StatusRecord:
    """Return how a run ended.

    Args:
        folder: The run folder.
        exit_code: The supervisor's exit code: 128 + n if signal n ended torchrun, -n if it ended the
            supervisor; None if there is none.
        interrupted: Whether the launcher was asked to stop.
        kills_before: The result of `count_memory_kills` before the run started.
        lacked: What `DiskWatch` saw used up on the folder's disk during the run.
    """
    log = folder / records.LOG_FILE
    status = name_memory_limit(diagnose_log(log, exit_code, interrupted))
    if exit_code is not None and exit_code < 0 and not interrupted:
        return _blame_killed_supervisor(folder, status, -exit_code)
    if status.status in (Status.OK, Status.INTERRUPTED):
        return status
    exhausted = find_exhausted_resource(folder)
    explained = _explain_by_calls(folder, status, exit_code, is_disk_full=bool(exhausted))
    if explained is not None:
        return explained
    # A disk that was full for a moment is blamed only if the log does not say what happened.
    if not exhausted and lacked and find_first_error(scrape_log(log)) is None:
        exhausted = lacked
    if exhausted:
        consequence = _lower_first_letter(status.reason)
        reason = f"No {exhausted} was left on the disk of {folder.name}; {consequence}"
        return replace(status, status=Status.CRASHED, reason=reason)
    if exit_code == _SIGKILL:
        # Ranks log errors when they lose torchrun, but those are a consequence and not the cause.
        reason = (
            f"torchrun was killed by SIGKILL{_after_last_iteration(folder)}; its ranks were ended."
        )
        status = replace(status, status=Status.CRASHED, reason=reason, rank=None)
    if "SIGKILL" in status.reason and _has_killed_for_memory(kills_before):
        return _blame_memory(folder, status)
    return status


def _blame_killed_supervisor(folder: Path, status: StatusRecord, number: int) -> StatusRecord:
    """Return the status of a run after signal `number` has ended its supervisor.

    The supervisor reports torchrun's signals as 128 + n, so a negative exit code is its own. When the supervisor
    is gone, the kernel ends torchrun by SIGTERM. The log shows that signal, which is not the cause.
    """
    name = signal.Signals(number).name
    reason = (
        f"The supervisor of torchrun was killed by {name}{_after_last_iteration(folder)}; all ranks "
        "were ended."
    )
    return replace(status, status=Status.CRASHED, reason=reason, rank=None)


def _blame_memory(folder: Path, status: StatusRecord) -> StatusRecord:
    """Return the status of a run that ended by SIGKILL because the kernel had run out of memory."""
    process = "torchrun" if status.rank is None else f"Rank {status.rank}"
    reason = (
        f"{process} was killed by the kernel, which had run out of memory"
        f"{_after_last_iteration(folder)}."
    )
    return replace(status, status=Status.OUT_OF_MEMORY, reason=reason)


def _has_killed_for_memory(kills_before: int | None) -> bool:
    """Return True if the kernel has killed a process for memory since `kills_before` was counted.

    The result is False if one of the two counts is unknown (None).
    """
    kills_now = count_memory_kills()
    return kills_now is not None and kills_before is not None and kills_now != kills_before


def name_memory_limit(status: StatusRecord) -> StatusRecord:
    """Return a status with the limit of the address space added to its reason, if a rank ran out of host memory.

    The status is returned unchanged in three cases: it has another cause, the address space is not limited, or a GPU
    ran out of memory. In the third case the reason already has the size of the GPU.
    """
    limit_bytes = read_address_limit()
    if status.status is not Status.OUT_OF_MEMORY or limit_bytes is None:
        return status
    is_of_gpu = "GPU " in status.reason or "CUDA" in status.reason
    if is_of_gpu:
        return status
    reason = (
        f"{status.reason.rstrip('.')}. A process may have {gib(limit_bytes)} GiB of addresses here "
        "(ulimit -v); raise the limit with 'ulimit -v unlimited'."
    )
    return replace(status, reason=reason)


def _explain_by_calls(
    folder: Path, status: StatusRecord, exit_code: int | None, *, is_disk_full: bool
) -> StatusRecord | None:
    """Return the status with the rank to blame and the reason, if the ranks' recorded calls show them.

    None means that the calls explain nothing. Stacks that explain nothing are removed unless NCCL's
    watchdog ended the run.
    """
    prefix, verdict = "", None
    if NCCL_TIMEOUT in status.reason:
        prefix, verdict = records.HANG_REASON_PREFIX, find_awaited_ranks(folder)
    elif exit_code:
        verdict = find_mismatched_call(folder / records.STACKS_FOLDER, status.rank)
        if is_disk_full:
            verdict = None  # The calls are incomplete, because ranks could not write all of them.
    if verdict is None:
        return None
    rank = verdict.culprits[0] if verdict.culprits else None
    return replace(status, reason=f"{prefix}{verdict.sentence} {status.reason}", rank=rank)


def raise_if_container_ended(
    folder: Path, ranks: RankProcesses, exit_code: int, disk: DiskWatch | None = None
) -> None:
    """Raise if something outside a container ended it, after ending the container's processes.

    Args:
        folder: The folder of the run's log.
        ranks: The container's processes.
        exit_code: The supervisor's exit code.
        disk: The watch of the log's disk. With None the disk is only asked now.

    Raises:
        EndedRunError: The engine or its client was lost, or somebody had the engine end the container.
    """
    # A negative code is a killed supervisor's, and Docker's client is gone because of that.
    end = ranks.read_container_end() if exit_code > 0 else None
    if end is None:
        return
    # On a full disk the client ends with a code because it cannot write. The disk may have room again by now.
    was_full = find_exhausted_resource(folder) or (disk and disk.exhausted_resource)
    if end.runs and exit_code < _SIGNAL_BASE and was_full:
        return
    after, ranks_are_visible = _after_last_iteration(folder), bool(ranks.find_by_rank())
    ranks.stop()
    status = _explain_container_end(end, exit_code, after, ranks_are_visible=ranks_are_visible)
    if status is not None:
        raise EndedRunError(status.reason, status.status)


def _explain_container_end(
    end: ContainerEnd, exit_code: int, after: str, *, ranks_are_visible: bool
) -> StatusRecord | None:
    """Return the status of a run whose container something outside of it has ended; None if it ended by itself.

    Args:
        end: What the engine reports.
        exit_code: The exit code of the engine's client, which is positive: 128 + n if signal n ended it.
        after: The last iteration, as a part of a sentence.
        ranks_are_visible: Whether the ranks are processes of this machine, so that they were ended.
    """
    engine = end.program.capitalize()
    if not end.engine_answers:
        consequence = (
            f"its ranks may train on, and '{end.program} rm --force {end.container[:12]}' ends them"
        )
        if ranks_are_visible:
            consequence = "its ranks were ended"
        reason = f"{engine}'s engine was lost{after}; {consequence}."
        return StatusRecord(Status.CRASHED, None, reason)
    signal_number = exit_code - _SIGNAL_BASE if exit_code > _SIGNAL_BASE else None
    if end.runs:
        cause = f"code {exit_code}" if signal_number is None else signal.Signals(signal_number).name
        reason = f"{engine}'s client ended by {cause}{after}; its container was ended."
        return StatusRecord(Status.CRASHED, None, reason)
    if end.out_of_memory:
        reason = f"The container was killed by the kernel, which had no more memory for it{after}."
        return StatusRecord(Status.OUT_OF_MEMORY, None, reason)
    if not end.signals or signal_number is None:
        return None
    cause = signal.Signals(end.signals[-1]).name
    # Podman has no daemon, so the program itself has ended the container.
    intermediary = engine if end.program == "podman" else f"{engine}'s engine"
    reason = f"The container was ended by {cause} through {intermediary}{after}."
    # `docker stop` sends SIGTERM before SIGKILL. SIGKILL alone is `docker kill`.
    was_stopped = signal.SIGKILL not in end.signals or signal.SIGTERM in end.signals
    status = Status.INTERRUPTED if was_stopped else Status.CRASHED
    return StatusRecord(status, None, reason)


def make_killed_launcher_status(folder: Path) -> StatusRecord:
    """Return the status of a run after its launcher was killed; the supervisor writes it in the launcher's place."""
    reason = f"The launcher was killed{_after_last_iteration(folder)}; all ranks were ended."
    return StatusRecord(Status.INTERRUPTED, None, reason)


def write_final_status(folder: Path, status: StatusRecord, wall_seconds: float) -> StatusRecord:
    """Write how a run ended and what its ranks recorded; return the status as it was written.

    Room that was held is freed, and empty or superfluous stacks are removed.

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
    # Ranks that are asked to stop write their stacks, and NCCL writes its calls even if a run ends well.
    # Neither explains anything then.
    if status.status in (Status.OK, Status.INTERRUPTED):
        shutil.rmtree(folder / records.STACKS_FOLDER, ignore_errors=True)
    remove_empty_stacks(folder / records.STACKS_FOLDER)
    collect_rank_records(folder)
    return status


def format_outcome(folder: Path, status: StatusRecord) -> str:
    """Return a line with the run's status, duration, reason and folder.

    A run that ended well has a reason if one of its ranks slows the iterations down. A second line names the
    command that resumes a failed run, if the run saved a checkpoint.
    """
    seconds = f"{status.wall_seconds:.0f} s" if status.wall_seconds is not None else "?"
    is_ok = status.status is Status.OK
    reason = status.reason
    if is_ok:
        slow_rank = find_slow_rank(folder)
        reason = slow_rank.sentence if slow_rank else ""
    outcome = f"{status.status} after {seconds}"
    if reason:
        outcome += f": {reason}"
    line = f"{outcome} → {relative_to_root(folder)}"
    if is_ok:
        return line
    for checkpoint in find_checkpoints(folder / records.CHECKPOINTS_FOLDER):  # Newest first.
        if checkpoint.is_finished:
            return (
                f"{line}\n'make resume RUN={relative_to_root(folder)}' continues from the checkpoint of "
                f"iteration {checkpoint.iteration}."
            )
    return line


def _after_last_iteration(folder: Path) -> str:
    """Return ` after iteration N` for the log's last iteration; empty for a log without iterations.

    With several nodes only one node's log has iterations.
    """
    log = scrape_log(folder / records.LOG_FILE)
    return describe_log_end(log) if log.iterations else ""


def _lower_first_letter(reason: str) -> str:
    """Return a reason to follow a semicolon: with a small first letter, or a default if it is empty."""
    if not reason:
        return "the log does not say more."
    return reason[0].lower() + reason[1:]
