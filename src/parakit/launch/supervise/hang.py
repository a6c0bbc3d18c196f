"""A hang: the log has stopped growing. Finds the rank that is stuck, and collects the stacks of all."""

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
"""At most so long are stacks and calls waited for."""

_C_LIBRARY = ctypes.CDLL(None)


class EndedRunError(LaunchError):
    """A run that was ended before it was done; the message is the reason in its status."""

    def __init__(self, message: str, status: Status, rank: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.rank = rank


class HangWatch:
    """Watches the size of the log; reports when it has not grown for too long."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._size = -1
        self._since = time.monotonic()

    def is_hanging(self, log: Path) -> bool:
        """Whether the log has not grown for the timeout; one that was removed does not hang."""
        try:
            size = log.stat().st_size
        except FileNotFoundError:
            return False
        now = time.monotonic()
        if size != self._size:
            self._size, self._since = size, now
        return now - self._since >= self._timeout_seconds

    def error(self, stopped: Sequence[int], stacks: Path) -> EndedRunError:
        """Name the rank that the others wait for, if what the ranks left shows it."""
        where = why = ""
        if stopped:
            (stacks / STOPPED_FILE).write_text(" ".join(map(str, stopped)))
        rank = stopped[0] if stopped else None
        with suppress(UnreadableDumpError, FileNotFoundError):
            found = judge_hang(gather_evidence([stacks]))
            rank = found.culprits[0] if found.culprits else rank
            why = f" {found.sentence}"
            where = f" Where each rank was is in {stacks.name}/."
        seconds = f"{self._timeout_seconds:g} s"
        reason = f"{HANG_REASON_PREFIX}nothing was logged for {seconds}.{why}{where}"
        return EndedRunError(reason, Status.CRASHED, rank)


def find_mismatched_call(stacks: Path, named: int | None) -> HangVerdict | None:
    """Of a run that failed: whose call did not fit the others', if what the ranks left shows one.

    What shows none is removed: a rank that failed by itself is named by the log. Against that rank
    counts only a call that differs from another's of its number: what came of it may fail anywhere.
    """
    with suppress(UnreadableDumpError):
        evidence = replace(gather_evidence([stacks]), is_over=True)
        found = judge_hang(evidence)
        if found.kind is HangKind.OTHER_COLLECTIVE and (named is None or find_mismatch(evidence)):
            return found
    shutil.rmtree(stacks, ignore_errors=True)
    return None


def find_awaited_ranks(folder: Path) -> HangVerdict | None:
    """Of a run that NCCL's watchdog ended: for whom its ranks waited, if what they left shows it."""
    with suppress(UnreadableDumpError, FileNotFoundError):
        found = judge_hang(gather_evidence([folder / STACKS_FOLDER, folder / LOG_FILE]))
        if found.verdict is HangOutcome.HANG:
            return found
    return None


def collect_stacks(ranks: Mapping[int, psutil.Process], stacks: Path) -> list[int]:
    """Ask every rank of this machine for its stacks and wait until they are there.

    Returns:
        The ranks that a signal had stopped (SIGSTOP); they are continued, so that they answer.
    """
    stopped = sorted(rank for rank, process in ranks.items() if _is_stopped(process))
    deadline = time.monotonic() + STACK_SECONDS
    # A stopped process answers once it is continued, and then the others go on too: it comes last.
    for others in (ranks.keys() - stopped, stopped):
        asked = [
            stacks / f"rank{rank}{suffix}"
            for rank in others
            if _is_asked(ranks[rank])
            for suffix in (".txt", CALLS_SUFFIX)
        ]
        while time.monotonic() < deadline and not all(_is_filled(path) for path in asked):
            time.sleep(0.05)
        for path in filter(_is_filled, asked):
            # A rank keeps its file open; in a network file system other machines see it after this.
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return stopped


def _is_asked(process: psutil.Process) -> bool:
    """Ask a rank, if it lives and has a handler; its signal would end another process."""
    with suppress(psutil.NoSuchProcess):
        if _answers(process):
            # To the main thread: a stopped one answers before it goes on from where it is.
            _C_LIBRARY.tgkill(process.pid, process.pid, STACKS_SIGNAL)
            process.send_signal(signal.SIGCONT)
            return True
    return False


@contextmanager
def keep_filled_stacks(stacks: Path, clear_up: bool = True) -> Iterator[None]:
    """The folder for stacks while ranks run: they open their files at once, only a hang fills them.

    Nodes but the first leave it as it is: others may still write there.
    """
    stacks.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if clear_up:
            remove_empty_stacks(stacks)


def remove_empty_stacks(stacks: Path) -> None:
    """Remove files that nothing was written to, and the folder if none is left."""
    if not stacks.is_dir():
        return
    for path in stacks.iterdir():
        if path.stat().st_size == 0:
            path.unlink()
    if not any(stacks.iterdir()):
        stacks.rmdir()


def _is_filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _answers(process: psutil.Process) -> bool:
    """Whether it handles the signal; one that does not, or not yet, would die of it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # It has just died.
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1)
