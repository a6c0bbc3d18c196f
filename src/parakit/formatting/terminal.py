"""What a command prints: a console that a file can take too, lines that stay as they are; its end."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

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


def say_markdown(console: Console, text: str) -> None:
    """Print a page of Markdown as headings, lists and tables; its pictures are left out.

    Tables take the terminal's width; where there is none, such as in a file, 200 columns.
    """
    from rich.markdown import Markdown

    page = re.sub(r"^!\[.*\n+", "", text, flags=re.MULTILINE)
    console.print(Markdown(page), width=None if console.is_terminal else 200)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Exit with a command's status, without a traceback where Ctrl-C or the end of a pipe stops it."""
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # Such as of `| head`; what is left must not be flushed at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)
