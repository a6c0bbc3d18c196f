"""Progress for people: a bar on a terminal, one line a minute elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tools.preprocess.output.writer import Progress, Watch

LINE_SECONDS = 60.0
"""Between two lines where there is no terminal."""
_REDRAW_SECONDS = 0.2


@contextmanager
def progress_on(console: Console) -> Iterator[Watch]:
    """A function to call with the state after each block."""
    start = time.monotonic()
    if not console.is_terminal:
        yield _every(LINE_SECONDS, start + LINE_SECONDS, _lines(console, start))
        return
    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def draw(state: Progress) -> None:
            bar.update(
                task,
                completed=state.done_bytes,
                total=state.total_bytes or None,
                description=state.describe(time.monotonic() - start),
            )

        yield _every(_REDRAW_SECONDS, start, draw)


def _lines(console: Console, start: float) -> Watch:
    def show(state: Progress) -> None:
        seconds = time.monotonic() - start
        line = state.describe(seconds)
        done = state.done_bytes - (state.first_bytes or 0)
        if state.total_bytes and done > 0:
            left = seconds * (state.total_bytes - state.done_bytes) / done
            share = 100 * state.done_bytes / state.total_bytes
            line += f" · {share:.0f}% · {timedelta(seconds=round(left))} left"
        console.print(line)

    return show


def _every(seconds: float, first: float, show: Watch) -> Watch:
    """Show the state at `first` and then no more often than every so many seconds."""
    due = first

    def watch(state: Progress) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + seconds
            show(state)

    return watch
