"""Report the progress of a conversion, check the free disk space, and define its error.

A conversion copies tensors from one checkpoint format into another. `ConversionProgress` counts the
bytes and prints them, `check_disk_space` refuses a target that does not fit on its disk.
"""

from __future__ import annotations

import resource
import shutil
import time
from pathlib import Path

from rich.console import Console

from parakit.config.files import relative_to_root
from parakit.formatting.terminal import say
from parakit.formatting.units import amount, duration

_SECONDS_PER_LINE = 10.0
"""Seconds between two printed lines of progress."""
_BYTES_BESIDE_TENSORS = 64 << 20
"""Bytes that are reserved on the disk for metadata, tokenizer and configs."""


class ConversionError(ValueError):
    """A model that cannot be converted; one sentence that names the thing, the value and the remedy."""


class ConversionProgress:
    """A counter of converted bytes that prints a line every ten seconds."""

    def __init__(self, console: Console | None = None) -> None:
        """Set the counter to 0. Lines are printed to `console`; None prints nothing."""
        self._console = console
        self.begin("", 0)

    def begin(self, title: str, total_bytes: int) -> None:
        """Start the clock and the counter of a conversion of `total_bytes`; lines begin with `title`."""
        self._title, self._total, self._done = title, total_bytes, 0
        self._start = time.monotonic()
        self._next_line = self._start + _SECONDS_PER_LINE

    def done(self, written_bytes: int) -> None:
        """Count the bytes of a converted tensor, and print a line if the last one is ten seconds old."""
        self._done += written_bytes
        now = time.monotonic()
        if self._console is None or now < self._next_line:
            return
        self._next_line = now + _SECONDS_PER_LINE
        bytes_per_second = self._done / (now - self._start)
        seconds_left = (self._total - self._done) / bytes_per_second
        done, total = amount(self._done), amount(self._total)
        rate = f"{amount(bytes_per_second)}/s"
        say(self._console, f"{self._title}: {done} of {total}, {rate}, {seconds_left:.0f} s left")

    def summary(self, parameters: int) -> str:
        """Return the closing line: the number of parameters, the bytes, the time and the peak memory.

        The memory is the peak resident memory of this process, which includes its libraries.
        """
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seconds = duration(time.monotonic() - self._start)
        written = f"{amount(self._done)} in {seconds}, peak memory {amount(peak_bytes)}"
        return f"{parameters:,} parameters, {written}"


def check_disk_space(target: Path, tensor_bytes: int) -> None:
    """Raise an error if the disk of `target` lacks space for the tensors and 64 MiB of other files.

    `target` need not exist: its nearest existing parent folder decides which disk is meant.

    Raises:
        ConversionError: The disk has less free space; the sentence says how much.
    """
    parent = next(folder for folder in target.resolve().parents if folder.is_dir())
    needed_bytes = tensor_bytes + _BYTES_BESIDE_TENSORS
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise ConversionError(
            f"{relative_to_root(target)} needs {amount(needed_bytes)}, and {parent} has {amount(free_bytes)} "
            "free; make room there, or name another folder."
        )
