"""Every trainer whose log is known: one file each, and a file that is here is used.

A file names its `DIALECT`. A `LineFormat` takes an iteration's line apart; trainers that print the same
line with other names share one and add their names. Everything else that a line says is a `Fact`; `News`
says which lines do. How one is added: "A log dialect" in CONTRIBUTING.md.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import NamedTuple

from tools.report.read.iterations import OTHER, Iteration
from tools.report.read.scraped import Fact, Generation

Names = tuple[tuple[str, int, tuple[str, ...]], ...]
"""Field of an `Iteration`, power of ten that its unit takes, what it is called in a line."""


class LineField(NamedTuple):
    """One number of an iteration's line."""

    field: str
    """Of an `Iteration`, or `OTHER` and the name; empty for what is not read."""
    value: int | float | None
    start: int
    """Where the text of the value begins in the line."""
    stop: int
    """Where it ends. Lines whose fields all have a place are read as columns (`layouts.py`)."""
    power: int = 0
    """Of ten, by which the number as printed is multiplied."""


class FoundIteration(NamedTuple):
    """An iteration as a line tells it."""

    iteration: Iteration
    start: int
    """Where its text begins in the line."""
    fields: Sequence[LineField]
    """All that its text holds, what is not read included."""
    stamp: str = ""
    """Date and time, as printed."""
    generation: Generation = Generation()


Find = Callable[[str], list[FoundIteration]]
"""Every iteration of a line, in order."""


@dataclass(frozen=True)
class LineFormat:
    """How an iteration's line is recognised and taken apart."""

    mark: str
    """Each such line holds it; most other lines do not."""
    opening: re.Pattern[str]
    """How an iteration's text begins, mark first: a line is never cut behind it."""
    reader: Callable[[Names], Find]
    """Makes the function that reads it, given the names of all dialects that print it."""
    rank: int = 1
    """A log is of one format: of several in it, the one with the lowest rank."""


@dataclass(frozen=True)
class News:
    """Lines that say something beside iterations."""

    mark: str
    """Each holds it; empty: any line between iterations may say it."""
    read: Callable[[str], Iterable[Fact]]


@dataclass(frozen=True)
class Dialect:
    """One trainer's log."""

    name: str
    line: LineFormat | None = None
    names: Names = ()
    """What it calls the numbers of that line."""
    news: tuple[News, ...] = ()
    starts: tuple[str, ...] = ()
    """Texts of lines with which training starts, also again."""
    arguments: Callable[[Mapping[str, str]], Mapping[str, str]] = dict
    """Gives printed arguments the names and values that Megatron has today."""
    unread: tuple[tuple[str, str, re.Pattern[str]], ...] = ()
    """Trainers that are recognised and not read: name, why not, a line that only they print."""


@dataclass(frozen=True)
class LineReader:
    """A line format with the names of all dialects that print it."""

    mark: str
    mark_bytes: bytes
    opening: re.Pattern[str]
    find: Find


@dataclass(frozen=True)
class Known:
    """All dialects together."""

    dialects: tuple[Dialect, ...]
    lines: tuple[LineReader, ...]
    """Of several formats in one log the first is read."""
    news: tuple[News, ...]
    starts: tuple[str, ...]
    unread: tuple[tuple[str, str, re.Pattern[str]], ...]


@cache
def known() -> Known:
    """What the files of this folder say."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found: tuple[Dialect, ...] = tuple(
        import_module(f"{__name__}.{name}").DIALECT for name in names
    )
    formats = {id(each.line): each.line for each in found if each.line is not None}
    return Known(
        dialects=found,
        lines=tuple(
            _reader(line, found) for line in sorted(formats.values(), key=lambda line: line.rank)
        ),
        news=tuple(news for each in found for news in each.news),
        starts=tuple(start for each in found for start in each.starts),
        unread=tuple(trainer for each in found for trainer in each.unread),
    )


def iteration_of(fields: Iterable[LineField]) -> Iteration:
    """The iteration that a line's numbers make."""
    values: dict[str, int | float | None] = {}
    others: dict[str, float] = {}
    for name, value, *_ in fields:
        if name.startswith(OTHER):
            if value is not None:
                others[name.removeprefix(OTHER)] = value
        elif name:
            values[name] = value
    return Iteration(**values, other_losses=others or None)  # type: ignore[arg-type]


def find_iterations(text: str) -> list[Iteration]:
    """Every iteration in a piece of a log, in order of appearance."""
    for line in known().lines:
        if line.mark in text and (found := line.find(text)):
            return [each.iteration for each in found]
    return []


def canonical(arguments: Mapping[str, str]) -> dict[str, str]:
    """Printed arguments under Megatron's present names."""
    for dialect in known().dialects:
        arguments = dialect.arguments(arguments)
    return dict(arguments)


def _reader(line: LineFormat, dialects: tuple[Dialect, ...]) -> LineReader:
    names = tuple(name for each in dialects if each.line is line for name in each.names)
    return LineReader(line.mark, line.mark.encode(), line.opening, line.reader(names))
