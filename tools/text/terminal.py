"""A line on a terminal as it is: not broken at the width, not coloured, not read as markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line in a colour of rich's, such as `red`; a path in it stays whole."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
