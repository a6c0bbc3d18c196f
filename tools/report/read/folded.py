"""Logs whose lines a terminal or `fold` has cut at a width: found by what joining them restores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from tools.report.read.iteration_line import find_iterations
from tools.report.read.lines import MAX_LINE, LogPiece, numbered_lines, read_chunks

_WIDEST, _NARROWEST = 250, 60
_SAMPLE_BYTES = 1 << 21
_MIN_FULL = 3
_GAIN = 1.3
"""So many times more numbers must the joined lines give."""
_WEIGHT = 4
_MARK = re.compile(rb"iteration[ =]{1,12}\d{1,12} {0,4}/")


class Cut(Enum):
    """Where lines are cut."""

    ANYWHERE = auto()
    """At the width (`fold`, a terminal)."""
    BEHIND_BLANKS = auto()
    """Behind the last blank that fits (`fold -s`)."""
    AT_BLANKS = auto()
    """There, and the blanks are gone (a mail, an editor that fills paragraphs)."""


@dataclass(frozen=True)
class Fold:
    """How a log's lines are cut."""

    width: int
    cut: Cut

    def joint(self, line: bytes, following: bytes) -> bytes | None:
        """What joins a line to the one behind it; None where it had ended."""
        if self.cut is Cut.ANYWHERE or b" " not in line:
            return b"" if len(line) == self.width else None
        if self.cut is Cut.BEHIND_BLANKS and not line.endswith(b" "):
            return None
        if self.cut is Cut.AT_BLANKS and following[:1] in (b" ", b""):
            return None
        # It was cut only if the next word did not fit, with a blank before or behind it.
        word = following.split(b" ", 1)[0]
        blank = b" " if self.cut is Cut.AT_BLANKS else b""
        needed = len(line) + len(word) + (bool(blank) or len(word) < len(following))
        # How many blanks are gone is not known; behind these a number that is padded follows.
        padded = bool(blank) and line.endswith((b":", b"/", b"iteration"))
        return blank if needed > self.width or padded else None


def fold_of(path: Path) -> Fold | None:
    """How a log's lines are cut; None where they are not.

    Raises:
        OSError: The file cannot be opened or read.
    """
    sample = b""
    for chunk in read_chunks(path):
        sample += chunk
        # The first iteration's own line may be cut within the words that tell it.
        if _MARK.search(sample.replace(b"\n", b"")) or len(sample) >= _SAMPLE_BYTES:
            break
    lines = sample.split(b"\n")[:-1]
    width = max(map(len, lines), default=0)
    if not _NARROWEST <= width <= _WIDEST:
        return None
    found = {fold: _numbers(_joined(sample, fold)) for fold in _candidates(lines, width)}
    best = max(found, key=found.__getitem__, default=None)
    return best if best and found[best] > _GAIN * _numbers(sample) else None


def unfolded(pieces: Iterable[LogPiece], fold: Fold) -> Iterator[LogPiece]:
    """The lines as they were before they were cut, each with the number of its first part."""
    whole, number = b"", 0
    last: bytes | None = None
    for piece in pieces:
        lines: list[bytes] = []
        numbers: list[int] = []
        for line, place in zip(piece.data.split(b"\n"), piece.numbers, strict=False):
            joint = fold.joint(last, line) if last is not None else None
            if joint is None or len(whole) > MAX_LINE:
                if last is not None:
                    lines.append(whole)
                    numbers.append(number)
                whole, number = line, place
            else:
                whole += joint + line
            last = line
        if lines:
            yield LogPiece(b"\n".join([*lines, b""]), numbers)
    yield LogPiece(whole, (number,), whole=False)


def _candidates(lines: list[bytes], width: int) -> Iterator[Fold]:
    if sum(len(line) == width for line in lines) >= _MIN_FULL:
        yield Fold(width, Cut.ANYWHERE)
    if sum(line.endswith(b" ") for line in lines) >= _MIN_FULL:
        yield Fold(width, Cut.BEHIND_BLANKS)
    yield Fold(width, Cut.AT_BLANKS)


def _joined(sample: bytes, fold: Fold) -> bytes:
    return b"".join(piece.data for piece in unfolded(numbered_lines([sample]), fold))


def _numbers(text: bytes) -> int:
    """How many numbers the iteration lines of a text give; a time and a loss are worth more."""
    found = 0
    for line in text.decode("utf-8", "replace").splitlines():
        for iteration in find_iterations(line):
            values = (getattr(iteration, name) for name in iteration.__struct_fields__)
            found += sum(value is not None and value is not False for value in values)
            known = (iteration.elapsed_ms is not None) + (iteration.lm_loss is not None)
            found += _WEIGHT * known
    return found
