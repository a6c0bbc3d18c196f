"""Every trainer whose log is known: one file each, and a file that is here is used.

A file names its `DIALECT`. A `LineFormat` takes an iteration's line apart; trainers that print the same
line with other names share one and add their names. Everything else that a line says is a `Fact`; `News`
says which lines do. How one is added: "A log dialect" in CONTRIBUTING.md.
"""

from __future__ import annotations

import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import islice, pairwise
from typing import ClassVar, NamedTuple

from parakit.logs.iterations import EXTRA_METRIC_PREFIX, MEAN_SECONDS, Iteration
from parakit.logs.scraped import Fact, Generation

Names = Mapping[str, tuple[str, int]]
"""By a number's name in a line: its field of an `Iteration`, and the power of ten of its unit."""


class LineField(NamedTuple):
    """One number of an iteration's line."""

    field: str
    """Of an `Iteration`, or `OTHER` and the name; empty for what is not read."""
    value: int | float | None
    start: int = 0
    """Where the text of the value begins in the line."""
    stop: int = 0
    """Where it ends. Lines whose fields all have a place are read as columns (`layouts.py`)."""
    power: int = 0
    """Of ten, by which the number as printed is multiplied."""


class ParsedIteration(NamedTuple):
    """An iteration as a line tells it."""

    iteration: Iteration
    start: int
    """Where its text begins in the line."""
    fields: Sequence[LineField]
    """All that its text holds, what is not read included."""
    stamp: str = ""
    """Date and time, as printed."""
    generation: Generation = Generation()
    at_ms: float | None = None
    """When it ended, on the trainer's clock, where a line before it is needed for its time."""
    counts: Mapping[str, float] = {}
    """What had been trained by then, by the trainer's names, where a line before it says since when."""
    by_arguments: Callable[[Mapping[str, str]], Iteration | None] | None = None
    """Makes it of the log's arguments, where its number cannot be told without; None: not of these."""


class LineFormat(ABC):
    """How an iteration's line is recognised and taken apart.

    Args:
        names: What its numbers are called, by all dialects that print it.
    """

    mark: ClassVar[bytes]
    """Each such line holds it; most other lines do not."""
    opening: ClassVar[re.Pattern[str]]
    """How an iteration's text begins, mark first: a line is never cut behind it."""
    rank: ClassVar[int] = 1
    """A log is of one format: of several in it, the one with the lowest rank."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.word = self.mark.decode()

    @abstractmethod
    def find(self, line: str) -> list[ParsedIteration]:
        """Every iteration of a line, in order."""


_PAIR = re.compile(
    r"""['"]([^'"]{1,80})['"]: ['"]?([-+]?\d{1,20}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?)(?=['"]?[,}])"""
)
"""A number in a dictionary as Python or JSON writes it, with its name."""
_OF_A_POLICY = re.compile(r"reward|\bkl\b|advantage|polic|completion", re.IGNORECASE)


def are_policy_metrics(names: Iterable[str]) -> bool:
    """Whether numbers of these names are of reinforcement learning, whose loss is a policy's."""
    return any(map(_OF_A_POLICY.search, names))


class MetricsLine(LineFormat):
    """A line of many named numbers, of which few are an `Iteration`'s; usually they are a dictionary."""

    trainer: ClassVar[str]
    number: ClassVar[re.Pattern[str] | None] = None
    """The iteration's, and of how many it is, where the opening does not say it."""
    metric: ClassVar[re.Pattern[str]] = _PAIR
    """Name and number."""
    end: ClassVar[str] = "}"
    """What ends its text before the line ends."""

    def find(self, line: str) -> list[ParsedIteration]:
        """The steps of a line, each of its own text: several lines may be glued together."""
        starts = [match.start() for match in self.opening.finditer(line)]
        steps = []
        for start, stop in pairwise([*starts, len(line)]):
            end = line.find(self.end, start, stop) if self.end else -1
            steps.append(self._step(line[start : stop if end < 0 else end + 1], start))
        return [step for step in steps if step]

    def numbers(self, text: str) -> dict[str, str]:
        """Every number of a step by its name."""
        return dict(self.metric.findall(text))

    def _step(self, text: str, start: int) -> ParsedIteration | None:
        count, numbers = (self.number or self.opening).search(text), self.numbers(text)
        times = [
            LineField(field, float(numbers[name]) * 10**power)
            for name, (field, power) in self.names.items()
            if name in numbers and field in ("elapsed_ms", MEAN_SECONDS)
        ]
        if count is None or not times:
            return None
        found = [LineField(name, int(digits)) for name, digits in count.groupdict().items()]
        found.append(times[0])
        # Times are kept as printed too, and so is the loss of a policy, which is no language model's.
        own = {"elapsed_ms", "lm_loss"} if are_policy_metrics(numbers) else {"elapsed_ms"}
        for name, digits in islice(numbers.items(), _MAX_METRICS):
            field, power = self.names.get(name, (EXTRA_METRIC_PREFIX + name, 0))
            if field in own:
                field, power = EXTRA_METRIC_PREFIX + name, 0
            found.append(LineField(field, float(digits) * 10**power))
        generation = Generation(self.trainer, "steps")
        return ParsedIteration(make_iteration(found), start, found, generation=generation)


_MAX_METRICS = 200
_ReadFacts = Callable[[str], Iterable[Fact]]


@dataclass(frozen=True)
class EventReader:
    """Lines that say something beside iterations."""

    mark: str
    """Each holds it; empty: any line between iterations may say it."""
    read: _ReadFacts


def read_every_match(pattern: str, fact: Callable[[re.Match[str]], Fact | None]) -> _ReadFacts:
    """Reads a fact of each match: lines of several ranks may be glued together."""
    compiled = re.compile(pattern)
    return lambda line: filter(None, map(fact, compiled.finditer(line)))


def read_first_match(pattern: str, fact: Callable[[re.Match[str]], Fact | None]) -> _ReadFacts:
    """Reads a fact of the first match of a line."""
    compiled = re.compile(pattern)
    return lambda line: filter(None, map(fact, islice(compiled.finditer(line), 1)))


@dataclass(frozen=True)
class Dialect:
    """One trainer's log."""

    name: str
    line: type[LineFormat] | None = None
    names: Names = field(default_factory=dict)
    """What it calls the numbers of that line."""
    events: tuple[EventReader, ...] = ()
    starts: tuple[str, ...] = ()
    """Patterns of lines with which training starts, also again."""
    arguments: Callable[[Mapping[str, str]], Mapping[str, str]] = dict
    """Gives printed arguments the names and values that Megatron has today."""
    unread: tuple[tuple[str, str, re.Pattern[str]], ...] = ()
    """Trainers that are recognised and not read: name, why not, a line that only they print."""


@cache
def load_dialects() -> tuple[Dialect, ...]:
    """What the files of this folder say."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(import_module(f"{__name__}.{name}").DIALECT for name in names)


@cache
def load_line_formats() -> tuple[LineFormat, ...]:
    """Every format with its names; of several in one log the first is read."""
    lines = dict.fromkeys(each.line for each in load_dialects() if each.line)
    return tuple(
        line({k: v for each in load_dialects() if each.line is line for k, v in each.names.items()})
        for line in sorted(lines, key=lambda line: line.rank)
    )


def make_iteration(fields: Iterable[LineField]) -> Iteration:
    """The iteration that a line's numbers make."""
    values: dict[str, int | float | None] = {}
    others: dict[str, float] = {}
    for name, value, *_ in fields:
        if name.startswith(EXTRA_METRIC_PREFIX):
            if value is not None:
                others[name.removeprefix(EXTRA_METRIC_PREFIX)] = value
        elif name:
            values[name] = value
    return Iteration(**values, extra_metrics=others or None)  # type: ignore[arg-type]


def find_iterations(text: str) -> list[Iteration]:
    """Every iteration in a piece of a log, in order of appearance."""
    for line in load_line_formats():
        if line.word in text and (found := line.find(text)):
            return [each.iteration for each in found]
    return []


def canonicalise_arguments(arguments: Mapping[str, str]) -> dict[str, str]:
    """Printed arguments under Megatron's present names."""
    for dialect in load_dialects():
        arguments = dialect.arguments(arguments)
    return dict(arguments)
