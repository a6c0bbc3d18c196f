"""What a user sees while ranks train: iteration, loss, time left; a line now and then off a terminal."""

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
"""Off a terminal, one line at most so often."""


class LogFollower:
    """Reads what was added to a growing log since the last look."""

    def __init__(self, path: Path, begin_bytes: int = 0) -> None:
        self._file: BinaryIO = path.open("rb")
        self._file.seek(begin_bytes)
        self._rest = ""

    def new_iterations(self) -> list[Iteration]:
        """Iterations that were logged since the last call."""
        text = self._rest + self._file.read().decode("utf-8", errors="replace")
        lines, self._rest = split_lines(text) if text else ([], "")
        return [iteration for line in lines for iteration in find_iterations(line)]

    def close(self) -> None:
        """Stop following."""
        self._file.close()


class RunProgress:
    """Shows one run's progress on a console."""

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

    def show(self, iteration: Iteration) -> None:
        """Show the newest iteration."""
        loss = "" if iteration.lm_loss is None else f"loss {iteration.lm_loss:.4f}"
        note = f"{loss} · {iteration.elapsed_ms:.0f} ms"
        self._bar.update(self._task, completed=iteration.iteration, note=note)
        if self._console.is_terminal or time.monotonic() - self._last_line < QUIET_SECONDS:
            return
        self._last_line = time.monotonic()
        self._console.print(
            f"{self._title}: iteration {iteration.iteration}/{self._iterations}, {note}"
        )
