"""Progress for people: a bar on a terminal, one line a minute elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from tools.preprocess.output.writer import Progress as State
from tools.preprocess.output.writer import Watch

LINE_SECONDS = 60.0
"""Between two lines where there is no terminal."""
_REDRAW_SECONDS = 0.2


@contextmanager
def progress_on(console: Console) -> Iterator[Watch]:
    """A function to call with the state after each block."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar)


def describe(state: State, seconds: float) -> str:
    """Rates and counts, such as `142.1 MB/s · 1,234 documents · 567,890 tokens`."""
    rate = state.text_bytes / 1e6 / max(seconds, 1e-9)
    return f"{rate:.1f} MB/s · {state.documents:,} documents · {state.tokens:,} tokens"


class _Bar:
    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=None)
        self._start = time.monotonic()
        self._next = 0.0

    def __call__(self, state: State) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _REDRAW_SECONDS
        self._bar.update(
            self._task,
            completed=state.done_bytes,
            total=state.total_bytes or None,
            description=describe(state, now - self._start),
        )


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self._next = self._start + LINE_SECONDS
        self._first_bytes: int | None = None

    def __call__(self, state: State) -> None:
        now = time.monotonic()
        if self._first_bytes is None:
            self._first_bytes = state.done_bytes
        if now < self._next:
            return
        self._next = now + LINE_SECONDS
        seconds = now - self._start
        self._console.print(describe(state, seconds) + self._left(state, seconds))

    def _left(self, state: State, seconds: float) -> str:
        """Share done and time left, where the input's size is known."""
        done = state.done_bytes - (self._first_bytes or 0)
        if not state.total_bytes or done <= 0:
            return ""
        left = timedelta(seconds=round(seconds * (state.total_bytes - state.done_bytes) / done))
        return f" · {100 * state.done_bytes / state.total_bytes:.0f}% · {left} left"
