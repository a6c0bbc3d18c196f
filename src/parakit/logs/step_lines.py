"""Format of a line that reports one training step, for trainers that do not print Megatron's line.

A trainer's dialect lists the numbers of its line (`StepNumber`), each with the text before it and with what closes it:
a unit, a separator or a fixed number of decimals. A number that was cut off is left out. A line into which another one
was written is left out as a whole: a name comes twice, or a number in its middle has another end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from parakit.logs.dialects import LineField, LineFormat, ParsedIteration, make_iteration
from parakit.logs.iterations import CLOCK_SECONDS
from parakit.logs.scraped import Generation

NUMBER = r"([-+]?(?:\d[\d,]{0,18}(?:\.\d{0,18})?(?:[eE][-+]?\d{1,3})?|nan|inf))"
"""Pattern of a number in a group, with commas between thousands."""
SHORT_NUMBER = rf"{NUMBER}([KMBGT]?)"
"""Pattern of a number that may end with a suffix for thousands, millions and so on."""
_LONGEST_NUMBER = 12
"""Most characters of a number that a line's end has cut off."""
_SUFFIXES = {"": 0, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
_MAX_NUMBER = 1e100
_MAX_INTEGER = 10**18


@dataclass
class StepNumber:
    """One number of a step's line."""

    field: str
    """Field of `Iteration`, or EXTRA_METRIC_PREFIX with a name."""
    before: str
    """Pattern of the text before the number, which comes once in a line."""
    after: str = r"(?= \|)"
    """Pattern of what closes the number; a bar by default."""
    power: int = 0
    """Power of ten by which the printed number is multiplied."""
    value: str = NUMBER
    """Pattern of the number in a group, and of its suffix, such as `K`, in a second group if it may have one."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the text before the number, and of the number if it is closed."""
        return re.compile(f"{self.before}(?:{self.value}{self.after})?")


class StepLine(LineFormat):
    """Format of a step's line: an opening with the step's number, and numbers in any order.

    A step counts if its line has a loss, a time or a throughput.
    """

    trainer: ClassVar[str]
    numbers: ClassVar[tuple[StepNumber, ...]]
    clock: ClassVar[re.Pattern[str] | None] = None
    """Pattern of the date and time of a line, with milliseconds; None if the trainer prints none.

    The differences between the clocks of steps are their times, if no time is printed."""

    def find(self, line: str) -> list[ParsedIteration]:
        """Return the steps in a line, in order. The lines of several ranks may be joined to one."""
        openings = list(self.opening.finditer(line))
        steps = []
        clock = self._read_clock(line) if len(openings) == 1 else None
        starts = [opening.start() for opening in openings]
        for opening, (start, stop) in zip(openings, pairwise([*starts, len(line)]), strict=True):
            fields = [
                LineField(name, int(digits))
                for name, digits in opening.groupdict().items()
                if digits is not None
            ]
            numbers = self._read_numbers(line[start:stop])
            if not numbers:
                continue
            if clock is not None:
                numbers.append(LineField(CLOCK_SECONDS, clock))
            fields += numbers
            generation = Generation(self.trainer, "steps")
            iteration = make_iteration(fields)
            steps.append(ParsedIteration(iteration, start, fields, generation=generation))
        return steps

    def _read_numbers(self, text: str) -> list[LineField]:
        """Return the numbers of a step; empty if the text has none of them, or if it is torn."""
        fields = []
        for number in self.numbers:
            matches = list(number.pattern.finditer(text))
            if not matches:
                continue
            match = matches[0]
            is_cut_off = match[1] is None and match.end() + _LONGEST_NUMBER >= len(text)
            if len(matches) > 1 or (match[1] is None and not is_cut_off):
                # Another line was written into this one.
                return []
            if match[1] is None:
                continue
            suffix = match[2] if number.pattern.groups > 1 else ""
            value = _parse_number(match[1], number.power + _SUFFIXES[(suffix or "").upper()])
            if value is not None:
                fields.append(LineField(number.field, value))
        return fields

    def _read_clock(self, line: str) -> float | None:
        """Return the seconds of a line's date and time; None if the line has none."""
        match = self.clock.search(line) if self.clock else None
        if match is None:
            return None
        try:
            stamp = datetime.fromisoformat(match[1].replace(",", "."))
        except ValueError:
            return None
        return stamp.replace(tzinfo=UTC).timestamp()


def _parse_number(text: str, power: int) -> float | None:
    """Return a printed number times 10**power; None if it is too large for a measurement."""
    value = float(text.replace(",", ""))
    if power:
        # A decimal exponent in the text rounds once, a product twice.
        value = (
            float(f"{text.replace(',', '')}e{power}")
            if "e" not in text.lower()
            else value * 10.0**power
        )
    if abs(value) >= _MAX_NUMBER and text[-1].isdigit():
        return None
    return value
