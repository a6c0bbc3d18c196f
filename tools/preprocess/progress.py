"""How far a run is, and showing it: a bar on a terminal, one line a minute elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 60.0
"""Between two lines where there is no terminal."""
_REDRAW_SECONDS = 0.2


@dataclass
class Progress:
    """How far a run is; counts are of this process, without what an earlier one committed."""

    total_bytes: int
    """Of the input as stored; 0 if not known."""
    done_bytes: int = 0
    first_bytes: int | None = None
    """What was done at the first block: an earlier process did the most of that."""
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"reading": 0.0, "encoding": 0.0, "writing": 0.0}
    )
    """Processor time by stage."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Add the processor time of a block of code, on any thread, to a stage."""
        start = time.thread_time()
        yield
        with self._lock:
            self.seconds[stage] += time.thread_time() - start

    def add(self, done_bytes: int, text_bytes: int, documents: int, tokens: int) -> None:
        """Count a block, after which so much of the input is done."""
        self.done_bytes = done_bytes
        if self.first_bytes is None:
            self.first_bytes = done_bytes
        self.text_bytes += text_bytes
        self.documents += documents
        self.tokens += tokens

    def describe(self, seconds: float) -> str:
        """Rates and counts, such as `142.1 MB/s · 1,234 documents · 567,890 tokens`."""
        rate = self.text_bytes / 1e6 / max(seconds, 1e-9)
        return f"{rate:.1f} MB/s · {self.documents:,} documents · {self.tokens:,} tokens"


Watch = Callable[[Progress], None]


@contextmanager
def progress_on(console: Console) -> Iterator[Watch]:
    """A function to call with the state after each block."""
    start = time.monotonic()
    if not console.is_terminal:
        yield _every(LINE_SECONDS, start + LINE_SECONDS, lambda state: _line(state, console, start))
        return
    from rich import progress as rich  # not every command shows a bar

    columns = (
        rich.SpinnerColumn(),
        rich.BarColumn(),
        rich.TextColumn("{task.percentage:>3.0f}%"),
        rich.TextColumn("{task.description}"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def draw(state: Progress) -> None:
            said = state.describe(time.monotonic() - start)
            total = state.total_bytes or None
            bar.update(task, completed=state.done_bytes, total=total, description=said)

        yield _every(_REDRAW_SECONDS, start, draw)


def _line(state: Progress, console: Console, start: float) -> None:
    seconds = time.monotonic() - start
    line = state.describe(seconds)
    done = state.done_bytes - (state.first_bytes or 0)
    if state.total_bytes and done > 0:
        left = seconds * (state.total_bytes - state.done_bytes) / done
        share = 100 * state.done_bytes / state.total_bytes
        line += f" · {share:.0f}% · {timedelta(seconds=round(left))} left"
    console.print(line)


def _every(seconds: float, first: float, show: Watch) -> Watch:
    """Show the state at `first` and then no more often than every so many seconds."""
    due = first

    def watch(state: Progress) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + seconds
            show(state)

    return watch
