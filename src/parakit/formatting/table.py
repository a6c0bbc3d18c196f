"""Define a table once, and render it for a terminal, Markdown, HTML or CSV.

A row is any object, such as a run. A `Column` has a name, a function that returns a row's value, and a function that
formats the value. None is an unknown value: CSV has an empty cell, all other formats have a dash.
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


COLUMN_GAP = 2
"""Characters between two columns in a terminal."""

WRAPPED_WIDTH = 24
"""Largest minimum width, in characters, of a column that a terminal may wrap."""

NARROW = 16
"""Width below which a column must not need more than three lines per cell (`readable_table`)."""


@dataclass(frozen=True)
class Column[R]:
    """Column of a table whose rows are objects of type `R`."""

    name: str
    value: Callable[[R], Any]
    """Function that returns the value of a row; None is unknown."""
    text: Callable[[Any], str] = str
    """Function that formats a known value for people (`parakit.formatting.units`)."""
    right: bool = True
    """True aligns the column right, for numbers; False aligns it left."""
    style: Callable[[R], str] | None = None
    """Function that returns the terminal style of a row's cell, such as `red`."""
    rank: int = 0
    """Importance: if a terminal is too narrow, columns with the highest rank are left out first."""
    wraps: bool = False
    """True if a terminal may break the column's texts into several lines."""
    why: str | Callable[[R], str] = "not known"
    """Reason why a value is unknown, or a function that returns it for a row."""

    def cell(self, subject: R) -> str:
        """Return the text of the cell in the row of `subject`; an unknown value gives a dash."""
        value = self.value(subject)
        return DASH if value is None else self.text(value)


@dataclass(frozen=True)
class Table[R]:
    """Table with one row per object of type `R`."""

    columns: tuple[Column[R], ...]
    rows: tuple[R, ...]
    title: str = ""

    @property
    def header(self) -> list[str]:
        """Names of the columns."""
        return [column.name for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        """Texts of all cells, row by row."""
        return [[column.cell(row) for column in self.columns] for row in self.rows]

    def widths(self, width: int | None) -> list[int]:
        """Return the width of each column, in characters, in a terminal of `width` characters.

        Columns that do not wrap get the width of their longest text. The columns that wrap share the remaining
        characters, and each is at least as wide as its longest word. If the terminal is too narrow for that,
        words are broken, but numbers are not. If it is still too narrow, numbers are broken too. If `width` is
        None, every column is as wide as its longest text.

        The widths that rich chooses are not used. In a terminal that is too narrow for all words, rich 15 cuts
        characters off the columns that must not wrap. At 62 characters `1,234.5` became `1,23`, and at 55 the column
        was gone.
        """
        longest_texts = [max(map(len, texts)) for texts in self._texts_by_column]
        if width is None:
            return longest_texts
        text_width = width - COLUMN_GAP * len(longest_texts)
        column_widths = self.least()
        if sum(column_widths) > text_width:
            column_widths = self.least(_starts_like_number)
        if sum(column_widths) > text_width:
            column_widths = self.least(_may_be_broken)
        for _ in range(text_width - sum(column_widths)):
            growing = [
                index
                for index, column_width in enumerate(column_widths)
                if column_width < longest_texts[index]
            ]
            if not growing:
                break
            # The narrowest column that needs more characters gets the next one.
            narrowest = min(growing, key=lambda index: column_widths[index])
            column_widths[narrowest] += 1
        return column_widths

    def least(self, unbroken: Callable[[str], object] = str.strip) -> list[int]:
        """Return the minimum width of each column in characters.

        For a column that wraps, the minimum is the length of its longest unbreakable word, but at most
        WRAPPED_WIDTH. For any other column, it is the length of its longest text.

        Args:
            unbroken: Function that returns a true value for words that must not be broken. By default, no word
                may be broken.
        """
        minimum_widths = []
        for column, texts in zip(self.columns, self._texts_by_column, strict=True):
            if not column.wraps:
                minimum_widths.append(max(map(len, texts)))
                continue
            all_words = " ".join(texts).split()
            longest_word = max((len(word) for word in all_words if unbroken(word)), default=1)
            minimum_widths.append(min(WRAPPED_WIDTH, longest_word))
        return minimum_widths

    def fitting(self, width: int) -> Table[R]:
        """Return the table without the columns that do not fit into a terminal of `width` characters.

        Columns are added in the order of their rank, as long as there is space. Columns whose cells are all
        dashes or empty are left out too. A column that wraps counts as WRAPPED_WIDTH characters at most. The
        first column by rank always stays.
        """
        texts_by_column = self._texts_by_column
        kept_indices: list[int] = []
        remaining = width
        by_rank = sorted(range(len(self.columns)), key=lambda index: self.columns[index].rank)
        for index in by_rank:
            texts = texts_by_column[index]
            needed = max(map(len, texts))
            if self.columns[index].wraps:
                needed = min(needed, WRAPPED_WIDTH)
            needed += COLUMN_GAP
            cells = texts[1:]  # The first text is the column's name.
            has_values = any(cell not in ("", DASH) for cell in cells)
            is_first = not kept_indices
            if is_first or (needed <= remaining and has_values):
                remaining -= needed
                kept_indices.append(index)
        columns = tuple(self.columns[index] for index in sorted(kept_indices))
        return replace(self, columns=columns)

    @property
    def _texts_by_column(self) -> list[tuple[str, ...]]:
        """Texts of each column: its name, then its cells."""
        return list(zip(self.header, *self.cells, strict=True))


def _starts_like_number(word: str) -> bool:
    """Return True if a word starts with a digit, after any signs and brackets."""
    return word.strip("+−-(")[:1].isdigit()


def _may_be_broken(_: str) -> bool:
    """Return False for every word: none of them is unbreakable."""
    return False


@dataclass(frozen=True)
class TextTable:
    """Table whose cells are texts; `results.json` stores it unchanged."""

    name: str
    """Name in file names and JSON."""
    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    """Cells, row by row."""

    def wrapping(self) -> Table[tuple[str, ...]]:
        """Return a `Table` with the same cells, in columns that a terminal may wrap."""
        columns = (
            Column[tuple[str, ...]](name, itemgetter(index), right=False, wraps=True)
            for index, name in enumerate(self.header)
        )
        return Table(tuple(columns), self.lines, self.title)


def markdown_table(table: Table[Any] | TextTable) -> str:
    """Return the table in Markdown, with escaped cells and without the title."""
    lines = table.lines if isinstance(table, TextTable) else table.cells
    return markdown_rows(table.header, lines)


def markdown_text(text: str) -> str:
    """Return a text in one line, with escaped Markdown and HTML, so that it is one table cell."""
    return " ".join(text.split()).translate(_MARKDOWN_ESCAPES)


def markdown_rows(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    escape: Callable[[str], str] = markdown_text,
) -> str:
    """Return header and rows as a Markdown table.

    `escape` is applied to each cell; give `str` if the cells are Markdown already.
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(escape, line)) + " |" for line in lines)


_MARKDOWN_ESCAPES = str.maketrans(
    {sign: f"\\{sign}" for sign in "\\`*_|[]"} | {"<": "&lt;", ">": "&gt;"}
)


def csv_table[R](table: Table[R]) -> str:
    """Return the table as CSV. A cell has the value itself and not its text; unknown values give empty cells.

    Line breaks in a text are removed. A text that starts with =, + or @ gets a quote in front, because a
    spreadsheet would read it as a formula.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.header)
    for row in table.rows:
        writer.writerow([_make_csv_value(column.value(row)) for column in table.columns])
    return buffer.getvalue()


def _make_csv_value(value: Any) -> Any:
    """Return a text in one line that no spreadsheet reads as a formula; return other values unchanged."""
    if not isinstance(value, str):
        return value
    text = " ".join(value.split())
    return f"'{text}" if text[:1] in ("=", "+", "@") else text


def rich_table(table: Table[Any], width: int | None = None) -> RichTable:
    """Return the table for a terminal of `width` characters, with the widths of `Table.widths`.

    If `width` is None, no text is wrapped.
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
    for column, column_width in zip(table.columns, table.widths(width), strict=True):
        shown.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold",
            max_width=column_width,
            min_width=column_width,
        )
    for row in table.rows:
        cells = []
        for column in table.columns:
            style = column.style(row) if column.style else ""
            cells.append(Text(column.cell(row), style=style))
        shown.add_row(*cells)
    return shown


def readable_table(table: TextTable, width: int) -> RenderableType:
    """Return a table for a terminal of `width` characters: as columns, or as paragraphs if the terminal is narrow.

    Paragraphs are used if a word would not fit into its column. They are also used if a cell in a column under NARROW
    characters would need more than three lines. Consecutive rows with the same first cell get this cell as their
    heading. Each row is one paragraph under the heading, in which each cell follows the name of its column. Cells
    that are empty or a dash are left out.
    """
    wrapping_table = table.wrapping()
    width_for_whole_words = sum(wrapping_table.least()) + COLUMN_GAP * len(table.header)
    column_widths = wrapping_table.widths(width)
    if width_for_whole_words <= width and not _is_cramped(table, column_widths):
        return rich_table(wrapping_table, width)
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [Text(table.title, style="bold")]
    heading = ""
    for first_cell, *cells in table.lines:
        if first_cell != heading:
            heading = first_cell
            parts.append(Text(f" {heading}"))
        named_cells = zip(table.header[1:], cells, strict=True)
        text = " · ".join(f"{name} {cell}" for name, cell in named_cells if cell not in ("", DASH))
        parts.append(Padding(Text(text), (0, 0, 0, 3)))
    return Group(*parts, "")


def _is_cramped(table: TextTable, column_widths: Sequence[int]) -> bool:
    """Return True if a cell in a column under NARROW characters needs more than three lines."""
    for line in table.lines:
        for cell, column_width in zip(line, column_widths, strict=True):
            if column_width < NARROW and len(cell) > 3 * column_width:
                return True
    return False
