"""Logs whose lines a terminal or `fold` has cut at a width: found by what joining them restores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.report.read.iteration_line import find_iterations
from tools.report.read.lines import read_chunks

_WIDEST, _NARROWEST = 250, 60
_SAMPLE_BYTES = 1 << 21
_MIN_FULL = 3
_GAIN = 1.3
"""So many times more numbers must the joined lines give."""
_MARK = re.compile(rb"iteration[ =]{1,12}\d{1,12} {0,4}/")


def fold_width(path: Path) -> int | None:
    """The width at which a log's lines are cut; None where they are not.

    Raises:
        OSError: The file cannot be opened or read.
    """
    sample = b""
    for chunk in read_chunks(path):
        sample += chunk
        if _MARK.search(sample) or len(sample) >= _SAMPLE_BYTES:
            break
    lines = sample.split(b"\n")[:-1]
    width = max(map(len, lines), default=0)
    full = sum(len(line) == width for line in lines)
    if not _NARROWEST <= width <= _WIDEST or full < _MIN_FULL or not _MARK.search(sample):
        return None
    joined = b"".join(unfolded([sample], width))
    return width if _numbers(joined) > _GAIN * _numbers(sample) else None


def unfolded(chunks: Iterable[bytes], width: int) -> Iterator[bytes]:
    """The bytes of a log without the line ends that stand behind `width` others."""
    full = re.compile(rb"(?m)^([^\n]{%d})\n" % width)
    rest = b""
    for chunk in chunks:
        data = rest + chunk
        whole = data.rfind(b"\n") + 1
        # A line that is only cut here has not ended.
        yield full.sub(rb"\1", data[:whole])
        rest = data[whole:]
    yield rest


def _numbers(text: bytes) -> int:
    """How many numbers the iteration lines of a text give."""
    found = 0
    for line in text.decode("utf-8", "replace").splitlines():
        for iteration in find_iterations(line):
            values = (getattr(iteration, name) for name in iteration.__struct_fields__)
            found += sum(value is not None for value in values)
    return found
