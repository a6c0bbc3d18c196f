"""Texts and plots of the tutorial's chapters, which are data in `examples/experiments/tutorial/chapters.yaml`."""

from __future__ import annotations

from functools import cache

import msgspec

from parakit.config.files import read_yaml
from parakit.experiments.tutorial.rows import FOLDER


class PlottedLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a plot: pairs of a position and arithmetic over the rows (`claims.py`)."""

    name: str
    points: list[tuple[float, str]]


class ChapterPlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One panel of a chapter's picture."""

    title: str
    x: str
    y: str
    series: list[PlottedLine]


class Exercise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exercise that the author leaves to the reader, with our answer and the command that shows it."""

    question: str
    answer: str
    command: str


class Chapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chapter of the tutorial."""

    name: str
    title: str
    question: str
    answer: str
    plots: list[ChapterPlot]
    lessons: dict[str, str]
    """Lessons of runs, two sentences each, by the ids of these runs. A key with several ids has spaces between them."""
    exercises: list[Exercise]
    cpu_shows: str
    """Arithmetic of the chapter that small runs on CPU ranks show. The text follows "CPU ranks show"."""
    cpu_cannot: str
    """Part that small runs on CPU ranks cannot show. The text follows "They cannot"."""


@cache
def read_chapters() -> tuple[Chapter, ...]:
    """Return all chapters in the tutorial's order."""
    return tuple(msgspec.convert(read_yaml(FOLDER / "chapters.yaml"), list[Chapter]))
