"""How far a run is: one line that changes on a terminal, one a minute elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from tools.text import terminal

LINE_SECONDS = 60.0
"""Between two lines where there is no terminal."""


class ProgressLine:
    """Counts of this process, without what an earlier one committed; and what a user should know.

    While it is entered, the line is on the terminal, where its last state stays.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._is_terminal = self._console.is_terminal
        columns = (TextColumn("{task.description}"), TaskProgressColumn(), TimeRemainingColumn())
        self._shown = Progress(*columns, console=self._console, disable=not self._is_terminal)
        self._task = self._shown.add_task("", total=None)
        self._start = self._printed = time.monotonic()
        self._text_bytes = self._documents = self._tokens = 0
        self._line = ""

    def __enter__(self) -> Self:
        self._shown.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._shown.stop()
        if kind is None and self._line and not self._is_terminal:
            self.say(self._line)

    def say(self, sentence: str) -> None:
        """Print a sentence on a line of its own."""
        terminal.say(self._console, sentence)

    def add(self, done: int, total: int, text_bytes: int, documents: int, tokens: int) -> None:
        """Count a block, after which so many bytes of the input are done (of 0 if not known)."""
        self._text_bytes += text_bytes
        self._documents += documents
        self._tokens += tokens
        now = time.monotonic()
        rate = self._text_bytes / 1e6 / max(now - self._start, 1e-9)
        line = f"{rate:.1f} MB/s · {self._documents:,} documents · {self._tokens:,} tokens"
        self._shown.update(self._task, completed=done, total=total or None, description=line)
        self._line = line
        if not self._is_terminal and now - self._printed >= LINE_SECONDS:
            self._printed = now
            task = self._shown.tasks[0]
            if task.time_remaining is not None:
                left = timedelta(seconds=round(task.time_remaining))
                line += f" · {task.percentage:.0f}% · {left} left"
            self.say(line)
