"""What is printed with rich: a console that a file can take, and lines that stay as they are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def wide_console(columns: int = 140) -> Console:
    """The terminal at its own width; where there is none, such as in a file, so many columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else columns)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line in a colour of rich's, such as `red`.

    It is neither broken at the width, so that a path in it stays whole, nor coloured word by word, nor
    read as markup.
    """
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
