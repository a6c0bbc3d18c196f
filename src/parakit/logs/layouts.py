"""Lines that differ from one already understood only in their digits, read as columns.

Nearly all of a long log is such lines. A `LineLayout` is learned from one line, which its dialect
has taken apart: where its numbers stand, and which byte is fixed. Any other line of that length whose
other bytes are the same must then mean the same, so the numbers of thousands are computed at once, each
rounded once, as `float` does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parakit.logs.dialects import LineField, LineFormat
from parakit.logs.iterations import LOG_LINE, Columns, find_dtype
from parakit.logs.lines import is_torn

Bytes = NDArray[np.uint8]

_PLAIN = re.compile(rb"[\t -~]*\r?\Z")
_NUMBER = re.compile(rb"( *)(\d{1,15})(?:\.(\d{1,15}))?(?:[eE]([-+])(\d\d)(?!\d))?(?![\d.eE])")
_MAX_DIGITS = 15
"""Of a number that a float holds exactly; so is a power of ten up to 22."""
_MAX_POWER = 22
_POWERS = np.array([float(f"1e{power}") for power in range(_MAX_POWER + 1)])
_LONGEST, _SHORTEST = 2000, 40
_OF_THE_START = ("iteration", "total_iterations")
_MAX_START = 12
_MAX_LAYOUTS = 256
_MAX_FAILURES = 256
_DIGIT, _BLANK = ord("0"), ord(" ")
_CLASSES = np.arange(256, dtype=np.uint8)
_CLASSES[_DIGIT : _DIGIT + 10] = _DIGIT


@dataclass(frozen=True)
class _Number:
    """Where a field's digits stand."""

    field: str
    digits: NDArray[np.intp]
    """Of the mantissa."""
    padded: slice
    """Blanks, then digits; as one they are never mixed."""
    shift: int
    """Power of ten of the last digit, without the exponent."""
    exponent: NDArray[np.intp] | None = None
    sign: int = 1


@dataclass(frozen=True)
class LineLayout:
    """One kind of line."""

    length: int
    classes: Bytes
    """The line with each digit as 0."""
    fixed: NDArray[np.intp]
    """Where a digit must be the very same."""
    fixed_bytes: Bytes
    pads: NDArray[np.intp]
    """Where a blank may stand for a digit and the other way round."""
    numbers: tuple[_Number, ...]
    constants: tuple[tuple[str, float], ...]
    """Fields whose value is no number of digits (`nan`), the same in every line of this kind."""

    def read(self, lines: Bytes) -> tuple[NDArray[np.bool_], dict[str, NDArray[Any]]]:
        """Which rows are of this kind, and their fields."""
        classes = _CLASSES[lines]
        same = classes == self.classes
        padded, following = classes[:, self.pads], classes[:, self.pads + 1]
        # No blank follows a digit.
        same[:, self.pads] = (padded == _BLANK) | (padded == _DIGIT) & (following == _DIGIT)
        right = same.all(axis=1)
        right &= (lines[:, self.fixed] == self.fixed_bytes).all(axis=1)
        columns: dict[str, NDArray[Any]] = {}
        for number in self.numbers:
            columns[number.field], exact = _value(number, lines)
            right &= exact
        for name, value in self.constants:
            columns[name] = np.full(len(lines), value, find_dtype(name))
        return right, columns


def learn_layout(line: bytes, format_: LineFormat) -> LineLayout | None:
    """The layout of a line that is one iteration of plain characters; None where it is not.

    Args:
        line: Without its line end.
        format_: Takes it apart.
    """
    if not _SHORTEST <= len(line) <= _LONGEST or not _PLAIN.match(line):
        return None
    text = line.decode("ascii")
    if len(format_.opening.findall(text)) != 1 or len(found := format_.find(text)) != 1:
        return None
    if is_torn(text):
        return None
    parts = sorted(found[0].fields, key=lambda part: part.start)
    names = [part.field for part in parts if part.field]
    if len(set(names)) < len(names) or any(part.start >= part.stop for part in parts):
        return None
    if (layout := _layout(line, parts)) is None:
        return None
    # The line itself must be read as its dialect has read it.
    right, columns = layout.read(np.frombuffer(line, np.uint8)[np.newaxis])
    numbers = {number.field for number in layout.numbers}
    same = (columns[part.field][0] == part.value for part in parts if part.field in numbers)
    return layout if right[0] and all(same) else None


def _layout(line: bytes, parts: Sequence[LineField]) -> LineLayout | None:
    numbers, constants, free = [], [], np.zeros(len(line), np.bool_)
    free[: parts[0].start] = True
    free[parts[-1].stop :] = True  # Nothing behind the last field is read.
    for part in parts:
        number = _number(part, line)
        if number is not None:
            numbers.append(number)
        elif part.field and part.value is not None:
            constants.append((part.field, float(part.value)))
        if number is not None or not part.field:
            free[part.start : part.stop] = True
    if "iteration" not in {number.field for number in numbers}:
        return None
    buffer = np.frombuffer(line, np.uint8)
    classes = _CLASSES[buffer]
    fixed = np.flatnonzero((classes == _DIGIT) & ~free)
    pads = np.concatenate([np.arange(each.padded.start, each.padded.stop - 1) for each in numbers])
    of_digits = (fixed, buffer[fixed], pads)
    return LineLayout(len(line), classes, *of_digits, tuple(numbers), tuple(constants))


def _number(part: LineField, line: bytes) -> _Number | None:
    """Where the digits of a part are; None where its value is not one of digits alone."""
    if not part.field or part.value is None:
        return None
    match = _NUMBER.match(line, part.start, part.stop)
    if match is None:
        return None
    # The first blank parts the name from the number; the others may be digits in another line.
    start, stop = part.start + bool(match[1]), match.end(2)
    fraction = np.arange(*match.span(3)) if match[3] else np.zeros(0, np.intp)
    digits = np.concatenate([np.arange(start, stop), fraction])
    if len(digits) > _MAX_DIGITS or (part.field in _OF_THE_START and stop - start > _MAX_START):
        return None
    return _Number(
        part.field,
        digits,
        slice(start, stop),
        part.power - len(fraction),
        np.arange(*match.span(5)) if match[5] else None,
        -1 if match[4] == b"-" else 1,
    )


def _value(number: _Number, lines: Bytes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """A number of each line, and whether it is exact to the last bit: of each line, or of all."""

    def whole(digits: NDArray[np.intp]) -> NDArray[np.float64]:
        # The low four bits of a digit are its value, those of a blank are zero.
        weights = 10.0 ** np.arange(len(digits) - 1, -1, -1)
        found: NDArray[np.float64] = (lines[:, digits] & 15) @ weights
        return found

    mantissa = whole(number.digits)
    if find_dtype(number.field) is np.int64:
        return mantissa.astype(np.int64), np.ones(1, np.bool_)
    power = np.array([float(number.shift)])
    if number.exponent is not None:
        power = power + number.sign * whole(number.exponent)
    exact = np.abs(power) <= _MAX_POWER
    power = np.where(exact, power, 0)
    shift = np.abs(power).astype(np.intp)
    return np.where(power >= 0, mantissa * _POWERS[shift], mantissa / _POWERS[shift]), exact


class LogBlock:
    """Whole lines of a log: which of them are plain iteration lines, and those as columns.

    Args:
        data: The lines, each with its newline.
        numbers: Of each line, where it stands in the file.
    """

    def __init__(self, data: bytes, numbers: Sequence[int]) -> None:
        self.data = data
        self.numbers = numbers
        self._buffer = np.frombuffer(data, np.uint8)
        self.stops = np.flatnonzero(self._buffer == ord("\n"))
        """Where each line ends, its line end excluded."""
        self.starts = np.concatenate([[0], self.stops[:-1] + 1])
        self.plain = np.zeros(len(self.stops), np.bool_)
        self.columns = Columns(len(self.stops), {LOG_LINE: np.array(numbers, np.int64)})

    def text(self, first: int, behind: int) -> bytes:
        """The lines from `first` to before `behind`, line ends included."""
        return self.data[self.starts[first] : self.stops[behind - 1] + 1]

    def fill(self, layout: LineLayout, first: int = 0) -> None:
        """Read the lines of a kind, from one on."""
        lengths = self.stops[first:] - self.starts[first:]
        places = first + np.flatnonzero((lengths == layout.length) & ~self.plain[first:])
        if not len(places):
            return
        windows = np.lib.stride_tricks.sliding_window_view(self._buffer, layout.length)
        right, columns = layout.read(windows[self.starts[places]])
        places = places[right]
        self.plain[places] = True
        for name, values in columns.items():
            if name not in self.columns.values:
                self.columns.values[name] = np.zeros(self.columns.count, find_dtype(name))
                self.columns.known[name] = np.zeros(self.columns.count, np.bool_)
            self.columns.values[name][places] = values[right]
            self.columns.known[name][places] = True

    def runs(self) -> Iterator[tuple[int, int, bool]]:
        """Lines of one sort that follow each other: first, behind the last, whether plain."""
        edges = np.flatnonzero(self.plain[1:] != self.plain[:-1]) + 1
        bounds = [0, *edges.tolist(), len(self.plain)]
        for first, behind in pairwise(bounds):
            yield first, behind, bool(self.plain[first])


class LayoutReader:
    """Cuts a log into blocks, and learns the layouts of its lines on the way.

    Args:
        other_news: What a line holds that may say more than an iteration's numbers.
    """

    def __init__(self, other_news: re.Pattern[bytes]) -> None:
        self.format: LineFormat | None = None
        """Of the log's iterations; none is learned before it is known."""
        self._other_news = other_news
        self._layouts: dict[int, list[LineLayout]] = {}
        self._count = 0
        self._failures = 0

    def block(self, data: bytes, numbers: Sequence[int]) -> LogBlock:
        """Whole lines as a block."""
        block, format_ = LogBlock(data, numbers), self.format
        for length in np.unique(block.stops - block.starts).tolist():
            for layout in self._layouts.get(length, ()):
                block.fill(layout)
        if format_ is None or format_.mark not in data:
            return block
        for place in np.flatnonzero(~block.plain).tolist():
            if self._count >= _MAX_LAYOUTS or self._failures >= _MAX_FAILURES:
                break
            line = block.data[block.starts[place] : block.stops[place]]
            if block.plain[place] or format_.mark not in line:
                continue
            learned = None if self._other_news.search(line) else learn_layout(line, format_)
            self._failures = self._failures + 1 if learned is None else 0
            if learned is not None:
                self._count += 1
                self._layouts.setdefault(learned.length, []).append(learned)
                block.fill(learned, place)
        return block
