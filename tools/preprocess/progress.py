"""How far a run is, and showing it: one line that changes on a terminal, one a minute elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from datetime import timedelta
from typing import TextIO

LINE_SECONDS = 60.0
"""Between two lines where there is no terminal."""
_REDRAW_SECONDS = 0.2
_CLEAR = "\r\033[K"


class Progress:
    """Counts of this process, without what an earlier one committed; and what a user should know."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.total_bytes = 0
        """Of the input as stored; 0 if not known."""
        self.text_bytes = 0
        self.documents = 0
        self.tokens = 0
        self._done_bytes = 0
        self._first_bytes: int | None = None
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._start = time.monotonic()
        self._due = self._start + (0 if self._is_terminal else LINE_SECONDS)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def say(self, sentence: str) -> None:
        """Print a sentence on a line of its own."""
        self.clear()
        print(sentence, file=self._stream, flush=True)

    def clear(self) -> None:
        """Take away the line that changes."""
        if self._is_terminal:
            print(_CLEAR, end="", file=self._stream, flush=True)

    def add(self, done_bytes: int, text_bytes: int, documents: int, tokens: int) -> None:
        """Count a block, after which so much of the input is done, and show it when it is time."""
        self._done_bytes = done_bytes
        if self._first_bytes is None:
            self._first_bytes = done_bytes  # an earlier process did the most of that
        self.text_bytes += text_bytes
        self.documents += documents
        self.tokens += tokens
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + (_REDRAW_SECONDS if self._is_terminal else LINE_SECONDS)
        if self._is_terminal:
            line = self._line()[: shutil.get_terminal_size().columns - 1]
            self.clear()
            print(line, end="", file=self._stream, flush=True)
        else:
            self.say(self._line())

    def describe(self) -> str:
        """Rates and counts, such as `142.1 MB/s · 1,234 documents · 567,890 tokens`."""
        rate = self.text_bytes / 1e6 / max(self.seconds, 1e-9)
        return f"{rate:.1f} MB/s · {self.documents:,} documents · {self.tokens:,} tokens"

    def _line(self) -> str:
        line = self.describe()
        done = self._done_bytes - (self._first_bytes or 0)
        if self.total_bytes and done > 0:
            left = self.seconds * (self.total_bytes - self._done_bytes) / done
            share = 100 * self._done_bytes / self.total_bytes
            line += f" · {share:.0f}% · {timedelta(seconds=round(left))} left"
        return line
