"""Read iteration lines by column that differ only in their digits from a line that was parsed before.

Nearly all lines of a long log are such lines. A `LineLayout` is learned from one line that its dialect has parsed: it
says where the numbers are, and which bytes are fixed. Another line of the same length with the same fixed bytes has
the same meaning, so the numbers of thousands of lines are computed at once. Each number is rounded once, as by
`float`.
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
"""Most digits of a number that a float holds exactly."""
_MAX_POWER = 22
"""Largest power of ten that a float holds exactly."""
_POWERS = np.array([float(f"1e{power}") for power in range(_MAX_POWER + 1)])
_LONGEST, _SHORTEST = 2000, 40
_ITERATION_NUMBERS = ("iteration", "total_iterations")
_MAX_ITERATION_DIGITS = 12
_MAX_LAYOUTS = 256
_MAX_FAILURES = 256
_DIGIT, _BLANK = ord("0"), ord(" ")
_CLASSES = np.arange(256, dtype=np.uint8)
_CLASSES[_DIGIT : _DIGIT + 10] = _DIGIT


@dataclass(frozen=True)
class _Number:
    """Positions of the digits of one field in a line."""

    field: str
    digits: NDArray[np.intp]
    """Positions of the mantissa's digits."""
    padded: slice
    """Positions of the padding and the digits before the point. In each line blanks come first, then digits."""
    shift: int
    """Power of ten of the last digit, without the exponent."""
    exponent: NDArray[np.intp] | None = None
    """Positions of the exponent's digits; None without exponent."""
    sign: int = 1
    """Sign of the exponent."""


@dataclass(frozen=True)
class LineLayout:
    """Positions of the numbers in iteration lines of one length, and the bytes that all these lines share."""

    length: int
    classes: Bytes
    """Bytes of the line, with each digit replaced by 0."""
    fixed: NDArray[np.intp]
    """Positions of digits that are equal in all lines, such as in names."""
    fixed_bytes: Bytes
    pads: NDArray[np.intp]
    """Positions that may have a blank or a digit."""
    numbers: tuple[_Number, ...]
    constants: tuple[tuple[str, float], ...]
    """Fields with a value that is no number of digits (`nan`), which is equal in all lines of this kind."""

    def read(self, lines: Bytes) -> tuple[NDArray[np.bool_], dict[str, NDArray[Any]]]:
        """Read the numbers of many lines at once.

        Args:
            lines: One row of bytes per line; all rows have the length of this layout.

        Returns:
            True for each line that has this layout, and one array per field of an iteration, by the field's name.
            The arrays have a value per line, which is meaningless for lines without this layout.
        """
        classes = _CLASSES[lines]
        is_equal = classes == self.classes
        padded, next_classes = classes[:, self.pads], classes[:, self.pads + 1]
        # A blank may come before digits, and never after a digit.
        is_equal[:, self.pads] = (padded == _BLANK) | (padded == _DIGIT) & (next_classes == _DIGIT)
        has_layout = is_equal.all(axis=1)
        has_layout &= (lines[:, self.fixed] == self.fixed_bytes).all(axis=1)
        columns: dict[str, NDArray[Any]] = {}
        for number in self.numbers:
            columns[number.field], is_exact = _compute_values(number, lines)
            has_layout &= is_exact
        for name, value in self.constants:
            columns[name] = np.full(len(lines), value, find_dtype(name))
        return has_layout, columns


def learn_layout(line: bytes, format_: LineFormat) -> LineLayout | None:
    """Return the positions of the numbers in an iteration line, by which similar lines can be read much faster.

    None means that similar lines cannot be read in this way. For example, the line is torn, has several
    iterations or non-ASCII characters, or has a number with too many digits.

    Args:
        line: A line without its line end.
        format_: Format of the log's iteration lines.
    """
    if not _SHORTEST <= len(line) <= _LONGEST or not _PLAIN.match(line):
        return None
    text = line.decode("ascii")
    if len(format_.opening.findall(text)) != 1 or is_torn(text):
        return None
    iterations = format_.find(text)
    if len(iterations) != 1:
        return None
    parts = sorted(iterations[0].fields, key=lambda part: part.start)
    names = [part.field for part in parts if part.field]
    are_names_repeated = len(set(names)) < len(names)
    if are_names_repeated or any(part.start >= part.stop for part in parts):
        return None
    layout = _make_layout(line, parts)
    if layout is None or not _reads_like_dialect(layout, line, parts):
        return None
    return layout


def _reads_like_dialect(layout: LineLayout, line: bytes, parts: Sequence[LineField]) -> bool:
    """Return True if a layout gives the same numbers for its own line as the dialect, which gave `parts`."""
    has_layout, columns = layout.read(np.frombuffer(line, np.uint8)[np.newaxis])
    if not has_layout[0]:
        return False
    number_fields = {number.field for number in layout.numbers}
    return all(
        columns[part.field][0] == part.value for part in parts if part.field in number_fields
    )


def _make_layout(line: bytes, parts: Sequence[LineField]) -> LineLayout | None:
    """Return the layout of a line from its fields in order; None if it has no number of the iteration."""
    numbers, constants, free = [], [], np.zeros(len(line), np.bool_)
    free[: parts[0].start] = True
    free[parts[-1].stop :] = True  # Bytes after the last field are not read.
    for part in parts:
        number = _locate_number(part, line)
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
    pads = np.concatenate(
        [np.arange(number.padded.start, number.padded.stop - 1) for number in numbers]
    )
    return LineLayout(
        length=len(line),
        classes=classes,
        fixed=fixed,
        fixed_bytes=buffer[fixed],
        pads=pads,
        numbers=tuple(numbers),
        constants=tuple(constants),
    )


def _locate_number(part: LineField, line: bytes) -> _Number | None:
    """Return the positions of a field's digits in a line.

    None means that the field has no plain number (`nan` is none), or that the number has too many digits to be
    computed exactly.
    """
    if not part.field or part.value is None:
        return None
    match = _NUMBER.match(line, part.start, part.stop)
    if match is None:
        return None
    blank, _, fraction_text, exponent_sign, exponent_text = match.groups()
    # The first blank separates the name from the number. Other blanks may be digits in another line.
    start = part.start + 1 if blank else part.start
    stop = match.end(2)
    fraction = np.arange(*match.span(3)) if fraction_text else np.zeros(0, np.intp)
    digits = np.concatenate([np.arange(start, stop), fraction])
    if len(digits) > _MAX_DIGITS:
        return None
    if part.field in _ITERATION_NUMBERS and stop - start > _MAX_ITERATION_DIGITS:
        return None
    return _Number(
        part.field,
        digits,
        padded=slice(start, stop),
        shift=part.power - len(fraction),
        exponent=np.arange(*match.span(5)) if exponent_text else None,
        sign=-1 if exponent_sign == b"-" else 1,
    )


def _compute_values(number: _Number, lines: Bytes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the numbers at a layout's positions in all lines, and whether each number is exact to the last bit.

    The second array has one element per line, or a single element that holds for all lines.
    """
    mantissa = _compute_integers(lines, number.digits)
    if find_dtype(number.field) is np.int64:
        return mantissa.astype(np.int64), np.ones(1, np.bool_)
    power = np.array([float(number.shift)])
    if number.exponent is not None:
        power = power + number.sign * _compute_integers(lines, number.exponent)
    is_exact = np.abs(power) <= _MAX_POWER
    power = np.where(is_exact, power, 0)
    scale = _POWERS[np.abs(power).astype(np.intp)]
    # One multiplication or division by an exact power of ten rounds only once.
    return np.where(power >= 0, mantissa * scale, mantissa / scale), is_exact


def _compute_integers(lines: Bytes, digits: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the integer of each line whose digits are at these positions; blanks count as 0."""
    weights = 10.0 ** np.arange(len(digits) - 1, -1, -1)
    # The low four bits of a digit are its value, and those of a blank are zero.
    integers: NDArray[np.float64] = (lines[:, digits] & 15) @ weights
    return integers


class LogBlock:
    """Complete lines of a log. The plain iteration lines among them, which a layout can read, are also columns.

    Args:
        data: The lines with their newlines.
        numbers: Number of each line in the file.
    """

    def __init__(self, data: bytes, numbers: Sequence[int]) -> None:
        self.data = data
        self.numbers = numbers
        self._buffer = np.frombuffer(data, np.uint8)
        self.stops = np.flatnonzero(self._buffer == ord("\n"))
        """Position of each line's newline."""
        self.starts = np.concatenate([[0], self.stops[:-1] + 1])
        self.plain = np.zeros(len(self.stops), np.bool_)
        self.columns = Columns(len(self.stops), {LOG_LINE: np.array(numbers, np.int64)})

    def text(self, first: int, behind: int) -> bytes:
        """Return the bytes of the lines with index `first` to `behind` - 1, with their newlines."""
        return self.data[self.starts[first] : self.stops[behind - 1] + 1]

    def fill(self, layout: LineLayout, first: int = 0) -> None:
        """Read all lines that have a layout into `columns`, and mark these lines in `plain`.

        Lines before index `first`, and lines that are marked already, are not changed.
        """
        has_length = self.stops - self.starts == layout.length
        is_candidate = has_length & ~self.plain
        is_candidate[:first] = False
        candidates = np.flatnonzero(is_candidate)
        if not len(candidates):
            return
        # Row i of the view has the bytes from byte i of the block on, so no line is copied before it is selected.
        windows = np.lib.stride_tricks.sliding_window_view(self._buffer, layout.length)
        candidate_lines = windows[self.starts[candidates]]
        has_layout, columns = layout.read(candidate_lines)
        lines = candidates[has_layout]
        self.plain[lines] = True
        for name, values in columns.items():
            self._set_values(name, lines, values[has_layout])

    def _set_values(self, name: str, lines: NDArray[np.intp], values: NDArray[Any]) -> None:
        """Set the values of a field in the lines with these indices. A new field gets a column, known in no line."""
        if name not in self.columns.values:
            self.columns.values[name] = np.zeros(self.columns.count, find_dtype(name))
            self.columns.known[name] = np.zeros(self.columns.count, np.bool_)
        self.columns.values[name][lines] = values
        self.columns.known[name][lines] = True

    def sections(self) -> Iterator[tuple[int, int, bool]]:
        """Yield the sections of the block in order. The lines of a section are either all plain or all not plain.

        A section is the index of its first line, the index after its last line, and True if its lines are plain.
        """
        edges = np.flatnonzero(self.plain[1:] != self.plain[:-1]) + 1
        bounds = [0, *edges.tolist(), len(self.plain)]
        for first, behind in pairwise(bounds):
            yield first, behind, bool(self.plain[first])


class LayoutReader:
    """Reader of the blocks of a log, which learns the layouts of the log's iteration lines.

    Args:
        event_pattern: Pattern of lines that may state more than an iteration's numbers. No layout is learned
            from such lines.
    """

    def __init__(self, event_pattern: re.Pattern[bytes]) -> None:
        self.format: LineFormat | None = None
        """Format of the log's iterations. No layout is learned before the format is known."""
        self._event_pattern = event_pattern
        self._layouts: dict[int, list[LineLayout]] = {}
        self._count = 0
        self._failures = 0

    def block(self, data: bytes, numbers: Sequence[int]) -> LogBlock:
        """Return a block of complete lines, with its iteration lines read into columns.

        An iteration line without a known layout teaches the reader a new layout. The reader stops learning after
        _MAX_LAYOUTS layouts, or after _MAX_FAILURES lines in succession without a layout.

        Args:
            data: Lines with their newlines.
            numbers: Number of each line in the file.
        """
        block = LogBlock(data, numbers)
        for length in np.unique(block.stops - block.starts).tolist():
            for layout in self._layouts.get(length, ()):
                block.fill(layout)
        format_ = self.format
        if format_ is None or format_.mark not in data:
            return block
        for index in np.flatnonzero(~block.plain).tolist():
            if self._count >= _MAX_LAYOUTS or self._failures >= _MAX_FAILURES:
                break
            line = block.data[block.starts[index] : block.stops[index]]
            if not block.plain[index] and format_.mark in line:
                self._learn(block, index, line, format_)
        return block

    def _learn(self, block: LogBlock, index: int, line: bytes, format_: LineFormat) -> None:
        """Learn the layout of the line at `index`, and read this line and later lines of the block with it.

        A line that has no layout, or that may report an event, is counted as a failure.
        """
        layout = None if self._event_pattern.search(line) else learn_layout(line, format_)
        if layout is None:
            self._failures += 1
            return
        self._failures = 0
        self._count += 1
        self._layouts.setdefault(layout.length, []).append(layout)
        block.fill(layout, index)
