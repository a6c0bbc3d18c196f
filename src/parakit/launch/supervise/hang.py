"""Notice that a run's log has stopped growing, collect the stacks of all ranks, and find the stuck rank."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from parakit.artifacts.run import (
    ASKED_FILE,
    CALLS_SUFFIX,
    HANG_REASON_PREFIX,
    LOG_FILE,
    STACKS_FOLDER,
    STACKS_SIGNAL,
    STOPPED_FILE,
    Status,
)
from parakit.config.errors import LaunchError
from parakit.hang import (
    HangKind,
    HangOutcome,
    HangVerdict,
    UnreadableDumpError,
    find_mismatch,
    gather_evidence,
    judge_hang,
)

STACK_SECONDS = 6.0
"""Longest wait for the ranks' stacks and recorded calls."""

_C_LIBRARY = ctypes.CDLL(None)


class EndedRunError(LaunchError):
    """Error of a run that the launcher ended; its message is the reason in the run's status."""

    def __init__(self, message: str, status: Status, rank: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.rank = rank


class HangWatch:
    """A watch on the size of a log, which reports that the log has not grown for a timeout."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._size = -1
        self._since = time.monotonic()

    def is_hanging(self, log: Path) -> bool:
        """Return True if the log has not grown for the timeout; a log that was removed gives False."""
        try:
            size = log.stat().st_size
        except FileNotFoundError:
            return False
        now = time.monotonic()
        if size != self._size:
            self._size, self._since = size, now
        return now - self._since >= self._timeout_seconds

    def error(self, stopped: Sequence[int], stacks: Path) -> EndedRunError:
        """Return the error that ends a hanging run. The error names the rank for which the other ranks wait, if
        it is known.

        The ranks in `stopped`, which a signal had stopped, are written to STOPPED_FILE in `stacks`.
        """
        reason = f"{HANG_REASON_PREFIX}nothing was logged for {self._timeout_seconds:g} s."
        rank = None
        if stopped:
            (stacks / STOPPED_FILE).write_text(" ".join(map(str, stopped)))
            rank = stopped[0]
        with suppress(UnreadableDumpError, FileNotFoundError):
            verdict = judge_hang(gather_evidence([stacks]))
            if verdict.culprits:
                rank = verdict.culprits[0]
            reason += f" {verdict.sentence} Where each rank was is in {stacks.name}/."
        return EndedRunError(reason, Status.CRASHED, rank)


def find_mismatched_call(stacks: Path, named: int | None) -> HangVerdict | None:
    """Return the verdict on a failed run if a rank's call did not match the other ranks'; else None.

    Without such a call the stacks are removed, because the log names a rank that failed by itself. If the log has
    `named` a rank, a call counts only if it differs from another rank's call of the same number. Later calls may
    fail on any rank.
    """
    with suppress(UnreadableDumpError):
        evidence = replace(gather_evidence([stacks]), is_over=True)
        verdict = judge_hang(evidence)
        is_mismatch = verdict.kind is HangKind.OTHER_COLLECTIVE
        if is_mismatch and (named is None or find_mismatch(evidence)):
            return verdict
    shutil.rmtree(stacks, ignore_errors=True)
    return None


def find_awaited_ranks(folder: Path) -> HangVerdict | None:
    """Return the verdict on a run that NCCL's watchdog ended: for which rank the other ranks waited.

    None means that the ranks' stacks and the log do not show it.
    """
    with suppress(UnreadableDumpError, FileNotFoundError):
        verdict = judge_hang(gather_evidence([folder / STACKS_FOLDER, folder / LOG_FILE]))
        if verdict.verdict is HangOutcome.HANG:
            return verdict
    return None


def collect_stacks(ranks: Mapping[int, psutil.Process], stacks: Path) -> list[int]:
    """Ask every rank of this machine for its stacks, and wait until they are written or the time is over.

    The time of the request is written to ASKED_FILE, because the signal ends some waits in C code. A rank that hung
    there continues, and makes calls that it would not have made.

    Returns:
        The ranks that a signal had stopped (SIGSTOP). They are continued, because they could not answer.
    """
    stopped = sorted(rank for rank, process in ranks.items() if _is_stopped(process))
    deadline = time.monotonic() + STACK_SECONDS
    asked_ns, is_answered = time.time_ns(), False
    # Once a stopped process is continued, the ranks that waited for it continue too. So it is asked last,
    # when the stacks of the waiting ranks are written.
    for asked_ranks in (ranks.keys() - stopped, stopped):
        files: list[Path] = []
        for rank in asked_ranks:
            if _ask_for_stacks(ranks[rank]):
                files += (stacks / f"rank{rank}.txt", stacks / f"rank{rank}{CALLS_SUFFIX}")
        while time.monotonic() < deadline and not all(_is_filled(file) for file in files):
            time.sleep(0.05)
        filled_files = [file for file in files if _is_filled(file)]
        _write_to_disk(filled_files)
        is_answered = is_answered or bool(filled_files)
    asked_file = stacks / ASKED_FILE
    if is_answered and not asked_file.exists():
        asked_file.write_text(str(asked_ns))
    return stopped


def _write_to_disk(files: Sequence[Path]) -> None:
    """Have the kernel write the content of files to the disk.

    The ranks keep the files open. On a network file system other machines see their content only after this.
    """
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _ask_for_stacks(process: psutil.Process) -> bool:
    """Signal a rank to write its stacks; return False if the rank has ended or has no handler.

    Without a handler the signal would end the process.
    """
    with suppress(psutil.NoSuchProcess):
        if _handles_stacks_signal(process):
            # tgkill signals the main thread, which answers before it continues from where it was stopped.
            _C_LIBRARY.tgkill(process.pid, process.pid, STACKS_SIGNAL)
            process.send_signal(signal.SIGCONT)
            return True
    return False


@contextmanager
def keep_filled_stacks(stacks: Path, clear_up: bool = True) -> Iterator[None]:
    """Make the folder for stacks for the duration of the `with` block, and then remove empty files.

    Ranks open their files when they start, and only a hang fills them. `clear_up` is False on all nodes but the
    first, because other nodes may still write.
    """
    stacks.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if clear_up:
            remove_empty_stacks(stacks)


def remove_empty_stacks(stacks: Path) -> None:
    """Remove the empty files in a folder, and the folder if no file is left."""
    if not stacks.is_dir():
        return
    for path in stacks.iterdir():
        if path.stat().st_size == 0:
            path.unlink()
    if not any(stacks.iterdir()):
        stacks.rmdir()


def _is_filled(path: Path) -> bool:
    """Return True if the file exists and is not empty."""
    return path.is_file() and path.stat().st_size > 0


def _is_stopped(process: psutil.Process) -> bool:
    """Return True if a signal or a debugger has stopped the process."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _handles_stacks_signal(process: psutil.Process) -> bool:
    """Return True if the process has a handler for the signal; a process that starts has none yet."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # It has just died.
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    if match is None:
        return False
    # Signal n is bit n - 1 of the mask.
    caught_signals, signal_bit = int(match[1], 16), 1 << (STACKS_SIGNAL - 1)
    return bool(caught_signals & signal_bit)
