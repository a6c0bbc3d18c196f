"""A conversion's progress on the terminal, its closing line, and the room that it needs."""

from __future__ import annotations

import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tools.convert.hf.errors import ConversionError
from tools.spec.files import from_root
from tools.text.units import amount, duration

_LINE_SECONDS = 10.0
"""Between two lines of progress."""
_BESIDE_TENSORS = 64 << 20
"""Room for metadata, tokenizer and configs."""


@dataclass(frozen=True)
class Summary:
    """What a conversion did."""

    parameters: int
    written_bytes: int
    seconds: float
    peak_bytes: int
    """Of this process's memory, its libraries included."""

    @property
    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.parameters:,} parameters, {amount(self.written_bytes)} in "
            f"{duration(self.seconds)}, peak memory {amount(self.peak_bytes)}"
        )


class Work:
    """Counts bytes as they are written."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._title, self._total, self._done = "", 0, 0
        self._start = self._due = time.monotonic()

    def begin(self, title: str, total_bytes: int) -> None:
        """A conversion of so many bytes begins."""
        self._title, self._total, self._done = title, total_bytes, 0
        self._start = time.monotonic()
        self._due = self._start + _LINE_SECONDS

    def done(self, written_bytes: int) -> None:
        """A tensor was made."""
        self._done += written_bytes
        now = time.monotonic()
        if self._console is None or now < self._due:
            return
        self._due = now + _LINE_SECONDS
        rate = self._done / (now - self._start)
        left = (self._total - self._done) / rate
        self._console.print(
            f"{self._title}: {amount(self._done)} of {amount(self._total)}, {amount(rate)}/s, "
            f"{left:.0f} s left",
            highlight=False,
        )

    def summary(self, parameters: int) -> Summary:
        """At the end."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Summary(parameters, self._done, time.monotonic() - self._start, peak)


def check_room(target: Path, wanted_bytes: int) -> None:
    """Refuse a folder that its disk has no room for.

    Raises:
        ConversionError: With what is free.
    """
    there = next(folder for folder in target.resolve().parents if folder.is_dir())
    needed, free = wanted_bytes + _BESIDE_TENSORS, shutil.disk_usage(there).free
    if free < needed:
        raise ConversionError(
            f"{from_root(target)} needs {amount(needed)}, and {there} has {amount(free)} free; make "
            "room there, or name another folder."
        )
