"""Handle a request to stop (Ctrl-C, SIGTERM, SIGUSR1) once, and end processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

GRACE_SECONDS = 4.0
"""Time from SIGTERM to SIGKILL, and from SIGKILL to giving up; twice this is well under the promised 10 s."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to stop; Slurm's `--signal=USR1@120` announces the end of a job's time."""


class Interrupted(BaseException):
    """A request to stop. It is not an Exception, so that no handler for errors swallows it."""

    def __init__(self, signal_number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.signal_number = signal_number
        """The signal by which the request came. Slurm announces the end of a job's time by SIGUSR1."""


class _Request:
    """The pending request to stop of this process."""

    deferring = 0
    """Number of `with` blocks that defer a request. There are several if nodes share a process, as in tests."""
    came = False
    signal_number: int = signal.SIGTERM


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first request to stop in the `with` block into `Interrupted`; later requests are ignored.

    The signal's handler raises `Interrupted` in the code that the main thread executes at that moment. Python
    drops the exception if that code is a finalizer or the callback of a weak reference, as imports use them. So
    loops that wait must call `raise_if_stop_requested`, which raises the exception for a dropped request.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's signature
        for name in STOP_SIGNALS:
            signal.signal(name, signal.SIG_IGN)
        _Request.came = True  # This remembers the request if Python drops the exception below.
        _Request.signal_number = number
        if not _Request.deferring:
            raise Interrupted(number)

    previous_handlers = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        _Request.came = False


@contextmanager
def defer_stop_requests() -> Iterator[None]:
    """Hold a request to stop until `raise_if_stop_requested` is called in the `with` block, or until its end.

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
    """Raise if a request to stop has come, and forget the request.

    Raises:
        Interrupted: A request has come.
    """
    if _Request.came:
        _Request.came = False
        raise Interrupted(_Request.signal_number)


def end_processes(
    find: Callable[[], Iterable[psutil.Process]], grace_seconds: float | None = None
) -> None:
    """End all processes that `find` returns: SIGTERM first, and SIGKILL to those that it still finds after a while.

    `grace_seconds` is the time after each signal; None is GRACE_SECONDS.
    """

    def send_signal(number: signal.Signals) -> list[psutil.Process]:
        running = [process for process in find() if is_alive(process)]
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return running

    seconds = GRACE_SECONDS if grace_seconds is None else grace_seconds
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + seconds
        running = send_signal(number)
        while running and time.monotonic() < deadline:
            time.sleep(0.05)
            running = [process for process in running if is_alive(process)]
            # A process may have started another one before SIGKILL ended it.
            if not running and number is signal.SIGKILL:
                running = send_signal(number)


def is_alive(process: psutil.Process) -> bool:
    """Return True if a process still runs; a zombie, which some init processes never reap, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
