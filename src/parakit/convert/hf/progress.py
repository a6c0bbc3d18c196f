"""What stops a conversion, its progress on the terminal, and the room that it needs."""

from __future__ import annotations

import resource
import shutil
import time
from pathlib import Path

from rich.console import Console

from parakit.config.files import from_root
from parakit.formatting.terminal import say
from parakit.formatting.units import amount, duration

_LINE_SECONDS = 10.0
"""Between two lines of progress."""
_BESIDE_TENSORS = 64 << 20
"""Room for metadata, tokenizer and configs."""


class ConversionError(ValueError):
    """A model that cannot be converted; one sentence that names the thing, the value and the remedy."""


class ConversionProgress:
    """Counts bytes as they are written."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self.begin("", 0)

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
        done, total = amount(self._done), amount(self._total)
        left = (self._total - self._done) / rate
        say(self._console, f"{self._title}: {done} of {total}, {amount(rate)}/s, {left:.0f} s left")

    def summary(self, parameters: int) -> str:
        """The closing line; memory is this process's, its libraries included."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seconds = duration(time.monotonic() - self._start)
        written = f"{amount(self._done)} in {seconds}, peak memory {amount(peak)}"
        return f"{parameters:,} parameters, {written}"


def check_disk_space(target: Path, wanted_bytes: int) -> None:
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
