"""Run a function in a thread while a `with` block runs."""

from __future__ import annotations

import threading
from typing import Self


class BackgroundThread:
    """A thread that runs `_watch` during a `with` block. At the block's end `done` is set, and the block waits."""

    stop_seconds: float | None = None
    """Longest wait for `_watch` to return, for a `_watch` that may block; None waits without a limit."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        """Do the thread's work; subclasses define it, and it must return soon after `done` is set."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Set `done` and wait for the thread, as the end of the `with` block does."""
        self.done.set()
        self._thread.join(self.stop_seconds)
