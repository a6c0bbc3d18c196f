"""Dialects of logs: one file per trainer. Every file in this folder is used.

A file defines `DIALECT`. A `LineFormat` parses the line of an iteration. Trainers that print the same line with other
names share a format and add their names. Everything else that a line states is a `Fact`; an `EventReader` says which
lines state one. "A log dialect" in CONTRIBUTING.md says how to add a trainer.
"""

from __future__ import annotations

import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib import import_module
from itertools import islice, pairwise
from typing import ClassVar, NamedTuple

from parakit.logs.iterations import CLOCK_SECONDS, EXTRA_METRIC_PREFIX, MEAN_SECONDS, Iteration
from parakit.logs.scraped import Fact, Generation

Names = Mapping[str, tuple[str, int]]
"""Fields of `Iteration` and powers of ten of the units, by the name of a number in a line."""


class LineField(NamedTuple):
    """One number in a line that reports an iteration."""

    field: str
    """Field of `Iteration`, or EXTRA_METRIC_PREFIX with the printed name; empty for text that is not read."""
    value: int | float | None
    start: int = 0
    """Position in the line at which the text of the value begins."""
    stop: int = 0
    """Position at which the text ends. If all fields have positions, lines are read by column (`layouts.py`)."""
    power: int = 0
    """Power of ten by which the printed number is multiplied."""


class ParsedIteration(NamedTuple):
    """An iteration as it was parsed from a line of a log."""

    iteration: Iteration
    start: int
    """Position in the line at which the text of the iteration begins."""
    fields: Sequence[LineField]
    """All numbers of the text, also those that are not read."""
    stamp: str = ""
    """Date and time as printed; empty if there is none."""
    generation: Generation = Generation()
    at_ms: float | None = None
    """End of the iteration on the trainer's clock, if an earlier line is needed for its duration; else None."""
    counts: Mapping[str, float] = {}
    """Counts at the end of the iteration, by the trainer's names, if an earlier line has those at its start."""
    by_arguments: Callable[[Mapping[str, str]], Iteration | None] | None = None
    """Function that returns the iteration for the log's arguments, if its number follows only from these.

    None as its result means that the number cannot be found with these arguments."""
    by_order: bool = False
    """True if the line has no number of its step: an earlier line has it, else the lines are counted from 1."""


class LineFormat(ABC):
    """Parser of iteration lines in one format.

    Args:
        names: Names of the numbers in all dialects with this format.
    """

    mark: ClassVar[bytes]
    """Text in every line of this format, and in few other lines."""
    opening: ClassVar[re.Pattern[str]]
    """Pattern of the beginning of an iteration's text, the mark first. A line is never cut after it."""
    rank: ClassVar[int] = 1
    """Priority of the format. A log has one format: of several, the one with the lowest rank is read."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.word = self.mark.decode()

    @abstractmethod
    def find(self, line: str) -> list[ParsedIteration]:
        """Return the iterations in a line, in order; empty if there are none."""


_PAIR = re.compile(
    r"""['"]([^'"]{1,80})['"]: ['"]?([-+]?\d{1,20}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?)(?=['"]?[,}])"""
)
"""Pattern of a name and a number in a dictionary of Python or JSON."""
_POLICY_METRIC = re.compile(r"reward|\bkl\b|advantage|polic|pg_loss|completion", re.IGNORECASE)


def are_policy_metrics(names: Iterable[str]) -> bool:
    """Return True if a name belongs to reinforcement learning, whose loss is that of a policy."""
    return any(map(_POLICY_METRIC.search, names))


class MetricsLine(LineFormat):
    """Format of a line with many named numbers, usually a dictionary. Few of the numbers are fields of `Iteration`."""

    trainer: ClassVar[str]
    number: ClassVar[re.Pattern[str] | None] = None
    """Pattern of the iteration's number and of the number of iterations; None if they are in `opening`."""
    metric: ClassVar[re.Pattern[str]] = _PAIR
    """Pattern of a name and its number."""
    end: ClassVar[str] = "}"
    """Text that ends an iteration before the end of the line; empty if there is none."""
    needs_time: ClassVar[bool] = True
    """True if a line without a time is no iteration. Otherwise the line must have a number with a field."""

    def find(self, line: str) -> list[ParsedIteration]:
        """Return the steps in a line, in order. A line may be several joined lines."""
        starts = [match.start() for match in self.opening.finditer(line)]
        steps = []
        for start, next_start in pairwise([*starts, len(line)]):
            end = line.find(self.end, start, next_start) if self.end else -1
            stop = next_start if end < 0 else end + 1
            step = self._parse_step(line[start:stop], start)
            if step:
                steps.append(step)
        return steps

    def numbers(self, text: str) -> dict[str, str]:
        """Return the numbers of a step by name, as text."""
        return dict(self.metric.findall(text))

    def _parse_step(self, text: str, start: int) -> ParsedIteration | None:
        """Return the iteration that a text reports.

        None means that the text states no step number or, if the format needs a time, no time. Without this need,
        the text must state at least one number with a field of `Iteration`.

        Args:
            text: The text of the iteration.
            start: Index in the log line at which the text begins.
        """
        step_number = (self.number or self.opening).search(text)
        numbers = self.numbers(text)
        times = [
            LineField(field, float(numbers[name]) * 10**power)
            for name, (field, power) in self.names.items()
            if name in numbers and field in ("elapsed_ms", MEAN_SECONDS)
        ]
        is_step = bool(times) if self.needs_time else not self.names.keys().isdisjoint(numbers)
        if step_number is None or not is_step:
            return None
        fields = [LineField(name, int(digits)) for name, digits in step_number.groupdict().items()]
        fields += times[:1]
        # These numbers also keep their printed names. The loss of a policy is no loss of a language model.
        kept_as_printed = {"elapsed_ms"}
        if are_policy_metrics(numbers):
            kept_as_printed.add("lm_loss")
        for name, digits in islice(numbers.items(), _MAX_METRICS):
            field, power = self.names.get(name, (EXTRA_METRIC_PREFIX + name, 0))
            if field in kept_as_printed:
                field, power = EXTRA_METRIC_PREFIX + name, 0
            fields.append(LineField(field, float(digits) * 10**power))
        generation = Generation(self.trainer, "steps")
        return ParsedIteration(make_iteration(fields), start, fields, generation=generation)


# Lines of one training step. A number that was cut off is left out. A line into which another one was written is left
# out as a whole: a name comes twice, or a number in its middle has another end.
NUMBER = r"([-+]?(?:\d[\d,]{0,18}(?:\.\d{0,18})?(?:[eE][-+]?\d{1,3})?|nan|inf))"
"""Pattern of a number in a group, with commas between thousands."""
SHORT_NUMBER = rf"{NUMBER}([KMBGT]?)"
"""Pattern of a number that may end with a suffix for thousands, millions and so on."""
_LONGEST_NUMBER = 12
"""Most characters of a number that a line's end has cut off."""
_SUFFIXES = {"": 0, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
_MAX_NUMBER = 1e100


@dataclass
class StepNumber:
    """One of the numbers in a step's line: its field and the pattern that finds it."""

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
    """Format of a step's line: first the number of the step, then other numbers in any order.

    A line counts as a step if it has a loss, a time or a throughput.
    """

    trainer: ClassVar[str]
    numbers: ClassVar[tuple[StepNumber, ...]]
    clock: ClassVar[re.Pattern[str] | None] = None
    """Pattern of the date and time of a line, with milliseconds; None if the trainer prints none.

    The differences between the clocks of steps are their times, if no time is printed."""

    def find(self, line: str) -> list[ParsedIteration]:
        """Return the steps in a line, in order. A line may be the joined lines of several ranks."""
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
        """Return the numbers of a step.

        The list is empty if the text has no known number, or if another line was written into the text.
        """
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
        """Return the date and time of a line in seconds; None if the line has none."""
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


_MAX_METRICS = 200
_ReadFacts = Callable[[str], Iterable[Fact]]


@dataclass(frozen=True)
class EventReader:
    """Reader of lines that state something besides iterations."""

    mark: str
    """Text in every such line; empty if any line between iterations may be one."""
    read: _ReadFacts


def read_every_match(pattern: str, fact: Callable[[re.Match[str]], Fact | None]) -> _ReadFacts:
    """Return a reader of a fact from every match in a line. Lines of several ranks may be joined to one."""
    compiled = re.compile(pattern)
    return lambda line: filter(None, map(fact, compiled.finditer(line)))


def read_first_match(pattern: str, fact: Callable[[re.Match[str]], Fact | None]) -> _ReadFacts:
    """Return a reader of a fact from the first match in a line."""
    compiled = re.compile(pattern)
    return lambda line: filter(None, map(fact, islice(compiled.finditer(line), 1)))


@dataclass(frozen=True)
class Dialect:
    """Description of the logs of one trainer."""

    name: str
    line: type[LineFormat] | None = None
    names: Names = field(default_factory=dict)
    """Names of the numbers in that line."""
    events: tuple[EventReader, ...] = ()
    starts: tuple[str, ...] = ()
    """Patterns of lines with which training starts or restarts."""
    arguments: Callable[[Mapping[str, str]], Mapping[str, str]] = dict
    """Function that returns printed arguments with Megatron's present names and values."""
    unread: tuple[tuple[str, str, re.Pattern[str]], ...] = ()
    """Trainers whose logs are recognised and not read: name, reason, and pattern of a line."""


@cache
def load_dialects() -> tuple[Dialect, ...]:
    """Return the dialects of all files in this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(import_module(f"{__name__}.{name}").DIALECT for name in names)


@cache
def load_line_formats() -> tuple[LineFormat, ...]:
    """Return all formats of iteration lines, each with the names of numbers in the dialects that use it.

    The formats are in the order of their priority: if a log has lines of several formats, only the first is read.
    """
    names_by_format: dict[type[LineFormat], dict[str, tuple[str, int]]] = {}
    for dialect in load_dialects():
        if dialect.line:
            names_by_format.setdefault(dialect.line, {}).update(dialect.names)
    formats = sorted(names_by_format, key=lambda format_: format_.rank)
    return tuple(format_(names_by_format[format_]) for format_ in formats)


def make_iteration(fields: Iterable[LineField]) -> Iteration:
    """Return the iteration with the numbers of a line."""
    values: dict[str, int | float | None] = {}
    extra_metrics: dict[str, float] = {}
    for name, value, *_ in fields:
        if name.startswith(EXTRA_METRIC_PREFIX):
            if value is not None:
                extra_metrics[name.removeprefix(EXTRA_METRIC_PREFIX)] = value
        elif name:
            values[name] = value
    return Iteration(**values, extra_metrics=extra_metrics or None)  # type: ignore[arg-type]


def find_iterations(text: str) -> list[Iteration]:
    """Return the iterations in a part of a log, in order, by the first format that has any."""
    for format_ in load_line_formats():
        iterations = format_.find(text) if format_.word in text else []
        if iterations:
            return [parsed.iteration for parsed in iterations]
    return []


def canonicalise_arguments(arguments: Mapping[str, str]) -> dict[str, str]:
    """Return the printed arguments of any trainer under Megatron's present names."""
    for dialect in load_dialects():
        arguments = dialect.arguments(arguments)
    return dict(arguments)
