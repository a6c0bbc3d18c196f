"""Show a run's progress while its ranks train: iteration, loss and time left.

On a terminal this is a bar. Elsewhere a line is printed now and then.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from parakit.logs import Iteration, find_iterations, split_lines

QUIET_SECONDS = 10.0
"""Shortest time between two lines when the output is no terminal."""


class LogFollower:
    """Reader of a growing log. Each call returns the iterations that were added since the last call."""

    def __init__(self, path: Path, begin_bytes: int = 0) -> None:
        self._file: BinaryIO = path.open("rb")
        self._file.seek(begin_bytes)
        self._rest = ""

    def new_iterations(self) -> list[Iteration]:
        """Return the iterations that were logged since the last call; an unfinished line waits for the next call."""
        text = self._rest + self._file.read().decode("utf-8", errors="replace")
        lines, self._rest = split_lines(text) if text else ([], "")
        return [iteration for line in lines for iteration in find_iterations(line)]

    def close(self) -> None:
        """Close the log's file."""
        self._file.close()


class RunProgress:
    """A progress display of one run, shown during a `with` block."""

    def __init__(self, console: Console, title: str, iterations: int) -> None:
        self._console = console
        self._title = title
        self._iterations = iterations
        self._last_line = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=iterations, note="starting Megatron")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a text after the run's title, on a line of its own."""
        self._console.print(f"{self._title}: {text}", highlight=False)

    def show(self, iteration: Iteration) -> None:
        """Update the display with the newest iteration."""
        loss = "" if iteration.lm_loss is None else f"loss {iteration.lm_loss:.4f}"
        note = f"{loss} · {iteration.elapsed_ms:.0f} ms"
        self._bar.update(self._task, completed=iteration.iteration, note=note)
        if self._console.is_terminal or time.monotonic() - self._last_line < QUIET_SECONDS:
            return
        self._last_line = time.monotonic()
        self._console.print(
            f"{self._title}: iteration {iteration.iteration}/{self._iterations}, {note}"
        )
