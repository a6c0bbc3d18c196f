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

from tools.text.units import DASH

if TYPE_CHECKING:
    from rich.table import Table as RichTable


WRAPPED_WIDTH = 24
"""Fewest characters of a column that a terminal breaks into lines."""


def plain(value: object) -> str:
    """Text as it is; a dash for None."""
    return DASH if value is None else str(value)


@dataclass(frozen=True)
class Column[R]:
    """One column over rows that describe subjects of type `R`."""

    name: str
    value: Callable[[R], Any]
    """The value of a row; None is unknown."""
    text: Callable[[Any], str] = plain
    """How the value is written for people (`tools.text.units`)."""
    right: bool = True
    """Numbers align right."""
    style: Callable[[R], str] | None = None
    """The terminal's style of a row's cell."""
    rank: int = 0
    """Where a terminal is too narrow, columns of the highest rank are left out first."""
    wraps: bool = False
    """A terminal may break its texts into lines."""

    def cell(self, subject: R) -> str:
        """The text of one row."""
        return self.text(self.value(subject))


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

    @property
    def widths(self) -> list[int]:
        """Characters of each column's longest text, its name included."""
        return [max(map(len, texts)) for texts in self._texts()]

    @property
    def least_widths(self) -> list[int]:
        """Characters that each column needs in a terminal: one that wraps, its longest word."""
        words = ([word for text in texts for word in text.split()] for texts in self._texts())
        return [
            min(WRAPPED_WIDTH, max(map(len, found), default=0)) if column.wraps else width
            for column, width, found in zip(self.columns, self.widths, words, strict=True)
        ]

    def fitting(self, width: int) -> Table[R]:
        """The table for a terminal of so many characters, without columns that are all dashes.

        A column that wraps needs `WRAPPED_WIDTH`; the first in rank stays in any case.
        """
        chosen: set[int] = set()
        room = width
        order = sorted(range(len(self.columns)), key=lambda index: self.columns[index].rank)
        widths, texts = self.widths, self._texts()
        for index in order:
            longest = WRAPPED_WIDTH if self.columns[index].wraps else widths[index]
            needed = min(widths[index], longest) + 2
            known = any(text not in ("", DASH) for text in texts[index][1:])
            if index == order[0] or (needed <= room and known):
                room -= needed
                chosen.add(index)
        return replace(
            self, columns=tuple(c for index, c in enumerate(self.columns) if index in chosen)
        )

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


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Texts as a Markdown table; cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(markdown_text(cell) for cell in line) + " |" for line in lines
    )


def markdown_text(text: str) -> str:
    """Text that stays in its cell and starts no markup."""
    return " ".join(text.split()).translate(_MARKDOWN)


_MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_|[]"} | {"<": "&lt;", ">": "&gt;"})


def csv_table[R](table: Table[R]) -> str:
    """As CSV of the values, not their texts; unknown is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.header)
    for row in table.rows:
        writer.writerow([_csv_cell(column.value(row)) for column in table.columns])
    return buffer.getvalue()


def rich_table(table: Table[Any] | TextTable) -> RichTable:
    """For a terminal; columns that wrap share what the others leave, which are never cut."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if isinstance(table, TextTable):
        table = table.wrapping()
    shown = RichTable(
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column, width in zip(table.columns, table.least_widths, strict=True):
        shown.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold",
            min_width=width,
        )
    for row in table.rows:
        cells = [(column.cell(row), column.style) for column in table.columns]
        shown.add_row(*(Text(text, style=style(row) if style else "") for text, style in cells))
    return shown


def _csv_cell(value: object) -> object:
    if isinstance(value, str):
        # A cell must not start what a spreadsheet takes for a formula, nor hold a line's end.
        text = " ".join(value.split())
        return f"'{text}" if text[:1] in ("=", "+", "@") else text
    return value
