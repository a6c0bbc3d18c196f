"""A table defined once and rendered for a terminal, Markdown, HTML or CSV.

A column has a name, a function from a row's subject to its value, and a format. Unknown is None: an
empty cell in CSV, a dash elsewhere.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from parakit.formatting.units import DASH

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable


WRAPPED_WIDTH = 24
"""Fewest characters of a column that a terminal breaks into lines."""

NARROW = 16
"""A column with fewer characters is not broken into more than three lines."""


@dataclass(frozen=True)
class Column[R]:
    """One column over rows that describe subjects of type `R`."""

    name: str
    value: Callable[[R], Any]
    """The value of a row; None is unknown."""
    text: Callable[[Any], str] = str
    """How a known value is written for people (`parakit.formatting.units`)."""
    right: bool = True
    """Numbers align right."""
    style: Callable[[R], str] | None = None
    """The terminal's style of a row's cell."""
    rank: int = 0
    """Where a terminal is too narrow, columns of the highest rank are left out first."""
    wraps: bool = False
    """A terminal may break its texts into lines."""
    why: str | Callable[[R], str] = "not known"
    """Why a row's value is not known."""

    def cell(self, subject: R) -> str:
        """The text of one row."""
        value = self.value(subject)
        return DASH if value is None else self.text(value)


@dataclass(frozen=True)
class Table[R]:
    """Columns over subjects."""

    columns: tuple[Column[R], ...]
    rows: tuple[R, ...]
    title: str = ""

    @property
    def header(self) -> list[str]:
        """Names of the columns."""
        return [column.name for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        """Texts, row by row: what HTML templates take."""
        return [[column.cell(row) for column in self.columns] for row in self.rows]

    def widths(self, width: int | None) -> list[int]:
        """Characters of each column in a terminal that has `width`, with two between columns.

        Columns that wrap share what the others leave. Each has room for its longest word; where that
        is too much for the terminal for its longest number, and if that is too much for anything.
        """
        longest = [max(map(len, texts)) for texts in self._texts]
        if width is None:
            return longest
        found, room = longest, -1
        for unbroken in (str.strip, lambda word: word.strip("+−-(")[:1].isdigit(), lambda word: ""):
            found = self.least(unbroken)
            room = width - sum(found) - 2 * len(found)
            if room >= 0:
                break
        for _ in range(room):
            growing = [i for i in range(len(found)) if found[i] < longest[i]]
            if growing:
                found[min(growing, key=found.__getitem__)] += 1
        return found

    def least(self, unbroken: Callable[[str], object] = str.strip) -> list[int]:
        """Characters of each column if texts may be broken but for some words."""
        found = []
        for column, texts in zip(self.columns, self._texts, strict=True):
            words = [word for text in texts for word in text.split() if unbroken(word)]
            wrapped = min(WRAPPED_WIDTH, max(map(len, words), default=1))
            found.append(wrapped if column.wraps else max(map(len, texts)))
        return found

    def fitting(self, width: int) -> Table[R]:
        """The table for a terminal of so many characters, without columns that are all dashes.

        A column that wraps needs `WRAPPED_WIDTH`; the first in rank stays in any case.
        """
        texts = self._texts
        kept: list[int] = []
        places = sorted(range(len(self.columns)), key=lambda place: self.columns[place].rank)
        for place in places:
            longest = max(map(len, texts[place]))
            needed = min(longest, WRAPPED_WIDTH if self.columns[place].wraps else longest) + 2
            if not kept or (needed <= width and {*texts[place][1:]} - {"", DASH}):
                width -= needed
                kept.append(place)
        return replace(self, columns=tuple(self.columns[place] for place in sorted(kept)))

    @property
    def _texts(self) -> list[tuple[str, ...]]:
        """Texts column by column, the name first."""
        return list(zip(self.header, *self.cells, strict=True))


@dataclass(frozen=True)
class TextTable:
    """A table whose cells are text already; `results.json` keeps it as it is."""

    name: str
    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def wrapping(self) -> Table[tuple[str, ...]]:
        """The same with columns that a terminal may break."""
        columns = (
            Column[tuple[str, ...]](name, itemgetter(place), right=False, wraps=True)
            for place, name in enumerate(self.header)
        )
        return Table(tuple(columns), self.lines, self.title)


def markdown_table(table: Table[Any] | TextTable) -> str:
    """As Markdown; cells are escaped."""
    lines = table.lines if isinstance(table, TextTable) else table.cells
    return markdown_rows(table.header, lines)


def markdown_text(text: str) -> str:
    """Text that stays in its cell and starts no markup."""
    return " ".join(text.split()).translate(_MARKDOWN)


def markdown_rows(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    escape: Callable[[str], str] = markdown_text,
) -> str:
    """Texts as a Markdown table; cells are escaped, or as `str` leaves them if they are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(escape, line)) + " |" for line in lines)


_MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_|[]"} | {"<": "&lt;", ">": "&gt;"})


def csv_table[R](table: Table[R]) -> str:
    """As CSV of the values, not their texts; unknown is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.header)
    for row in table.rows:
        cells = [column.value(row) for column in table.columns]
        for place, value in enumerate(cells):
            if isinstance(value, str):
                # A cell must not start what a spreadsheet takes for a formula, nor hold a line's end.
                text = " ".join(value.split())
                cells[place] = f"'{text}" if text[:1] in ("=", "+", "@") else text
        writer.writerow(cells)
    return buffer.getvalue()


def rich_table(table: Table[Any], width: int | None = None) -> RichTable:
    """For a terminal; columns that wrap share what the others leave, which are never cut.

    Their words are broken only where so many characters (`width`) are too few for them.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column, needed in zip(table.columns, table.widths(width), strict=True):
        shown.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold",
            max_width=needed,
            min_width=needed,
        )
    for row in table.rows:
        cells = [(column.cell(row), column.style) for column in table.columns]
        shown.add_row(*(Text(text, style=style(row) if style else "") for text, style in cells))
    return shown


def readable_table(table: TextTable, width: int) -> RenderableType:
    """A table as lines and columns; where they are too narrow for its texts, a paragraph a line.

    The first cell heads the paragraphs that share it; the others follow with their names.
    """
    wrapping = table.wrapping()
    whole_words = sum(wrapping.least()) + 2 * len(table.header)
    found = wrapping.widths(width)
    cells = ((cell, room) for line in table.lines for cell, room in zip(line, found, strict=True))
    cramped = any(room < NARROW and len(cell) > 3 * room for cell, room in cells)
    if whole_words <= width and not cramped:
        return rich_table(wrapping, width)
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [Text(table.title, style="bold")]
    head = ""
    for first, *rest in table.lines:
        if first != head:
            head = first
            parts.append(Text(f" {first}"))
        named = zip(table.header[1:], rest, strict=True)
        text = " · ".join(f"{name} {cell}" for name, cell in named if cell not in ("", DASH))
        parts.append(Padding(Text(text), (0, 0, 0, 3)))
    return Group(*parts, "")
