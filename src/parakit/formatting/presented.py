"""Values that people and programs read: as text in a terminal, as HTML in a notebook, and as plain data.

A class says in `show` how a console prints a value, and in `to_dict` which data the value holds. The mixins
derive everything else from these two. Rich, pandas and polars are loaded on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120
"""Characters of a line of text and HTML."""
SHORT_LINES = 40
"""Lines of `repr`; `str` has all lines."""

_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{code}</pre>'


class Presented:
    """A mixin that shows a value as text, HTML and data. It is for frozen dataclasses with `repr=False`."""

    def show(self, console: Console) -> None:
        """Print the value to a console as its command prints it."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the value as data that `json.dumps` takes; it equals what the command's JSON has."""
        raise NotImplementedError

    def __str__(self) -> str:
        file = StringIO()
        self.show(_plain_console(file))
        lines = (line.rstrip() for line in file.getvalue().splitlines())
        return "\n".join(lines).strip("\n")

    def __repr__(self) -> str:
        lines = str(self).splitlines()
        if len(lines) > SHORT_LINES:
            more = len(lines) - SHORT_LINES
            lines[SHORT_LINES:] = [f"… and {more} more lines, which print() shows."]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook; rich escapes every text."""
        console = _plain_console(StringIO(), record=True)
        self.show(console)
        return console.export_html(inline_styles=True, code_format=_HTML)


class PresentedTable(Presented):
    """A presented value that also holds a table, which pandas and polars take."""

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the table as data; what a row lacks is not known."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        return _import_package("pandas").DataFrame(_columns(self.to_rows()))

    def to_polars(self) -> Any:
        """Return the table as a `polars.DataFrame`.

        Raises:
            ModuleNotFoundError: polars is not installed.
        """
        return _import_package("polars").DataFrame(_columns(self.to_rows()), strict=False)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested data as one flat row. For example, `{"time": {"bubble": 1}}` gives `{"time.bubble": 1}`.

    Lists are left out.
    """
    row: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            row |= flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            row[f"{prefix}{name}"] = value
    return row


def _plain_console(file: StringIO, record: bool = False) -> Console:
    """Return a console that writes text without control codes, in a terminal and in a notebook alike.

    With its default settings, rich would display every line separately in a notebook.
    """
    from rich.console import Console

    return Console(
        file=file,
        record=record,
        width=WIDTH,
        highlight=False,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
    )


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each column; None where a row lacks the column."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _import_package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f"{name} is not installed: pip install {name}, or use to_rows().", name=name
        ) from None
