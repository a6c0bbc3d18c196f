"""Print lines and Markdown to a terminal or a file, and exit with a command's status."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.console import Console


def wide_console(columns: int = 140) -> Console:
    """Return a console with the terminal's width; output to a file or a pipe has `columns` columns."""
    from parakit.formatting.console import CallerConsole

    return CallerConsole(width=None if sys.stdout.isatty() else columns)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a text exactly as it is, in a style of rich such as `red`; None is the default style.

    The text is not wrapped, so that paths in it can be copied. Numbers and paths are not coloured, and square
    brackets are not read as markup.
    """
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def say_markdown(console: Console, text: str) -> None:
    """Print a page of Markdown with headings, lists and tables, but without its images.

    In a terminal, the page has the terminal's width. In a file or a pipe, it has 200 columns.
    """
    from rich.markdown import Markdown

    page = re.sub(r"^!\[.*\n+", "", text, flags=re.MULTILINE)
    console.print(Markdown(page), width=None if console.is_terminal else 200)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run `main` and exit the process with the status that `main` returns.

    Ctrl-C gives status 130. A closed pipe, as after `| head`, gives 141. Neither prints a traceback. Other
    exceptions are not caught.
    """
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would raise the same error. So stdout becomes
        # the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)
