"""A request to stop (Ctrl-C, SIGTERM, SIGUSR1), once and not while clearing up; processes' end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

GRACE_SECONDS = 4.0
"""From SIGTERM to SIGKILL, and after that; both together stay well under the promised 10 s."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Slurm's `--signal=USR1@120` announces the end of a job's time."""


class Interrupted(BaseException):
    """A request to stop; not an Exception, so that nothing on the way swallows it."""


class _Request:
    deferring = 0
    """Blocks in the middle of something; several, where nodes share a process while they are tested."""
    came = False


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first request to stop into `Interrupted`; later ones do not disturb the clearing up.

    A handler runs wherever the main thread is, and Python drops what is raised in a finalizer or in a
    callback of a weak reference, of which every import makes one. So work that waits calls
    `raise_if_asked`, which finds a request that was dropped.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's signature
        for name in STOP_SIGNALS:
            signal.signal(name, signal.SIG_IGN)
        _Request.came = True  # Still asked for where Python drops what is raised here.
        if not _Request.deferring:
            raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _Request.came = False


@contextmanager
def defer_stop_requests() -> Iterator[None]:
    """Let a request to stop wait for `raise_if_asked` in the block, or for the block's end.

    Raises:
        Interrupted: At the end, if a request came and was not raised in the block.
    """
    _Request.deferring += 1
    try:
        yield
    finally:
        _Request.deferring -= 1
    if not _Request.deferring:
        raise_if_stop_requested()


def raise_if_stop_requested() -> None:
    """Act on a request to stop that has come.

    Raises:
        Interrupted: One has.
    """
    if _Request.came:
        _Request.came = False
        raise Interrupted


def end_processes(
    find: Callable[[], Iterable[psutil.Process]], grace_seconds: float | None = None
) -> None:
    """End processes: SIGTERM to all that a search finds, then SIGKILL to all that it still finds."""

    def signalled(number: signal.Signals) -> list[psutil.Process]:
        running = [process for process in find() if is_alive(process)]
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return running

    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + (grace_seconds or GRACE_SECONDS)
        running = signalled(number)
        while running and time.monotonic() < deadline:
            time.sleep(0.05)
            running = [process for process in running if is_alive(process)]
            if not running and number is signal.SIGKILL:  # One may have begun another meanwhile.
                running = signalled(number)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie, which an init that does not reap leaves, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
