"""Work in a thread while a `with` block runs."""

from __future__ import annotations

import threading
from typing import Self


class BackgroundThread:
    """Runs `_watch` while a `with` block runs; at its end `done` is set, and the block waits."""

    stop_seconds: float | None = None
    """For `_watch` to return, where it may wait for something that never comes; None is no limit."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        """The work; must return soon after `done` is set."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the work, as the end of the block does."""
        self.done.set()
        self._thread.join(self.stop_seconds)
