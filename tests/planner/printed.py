"""Screens of `parakit plan`, each printed once per session: tests that look at different answers share a search."""

from __future__ import annotations

from contextlib import redirect_stdout
from functools import cache
from io import StringIO

import pytest

from parakit.formatting.terminal import wide_console
from parakit.planner import command
from tests.program import run_plan

WIDTH = 100


@cache
def print_plan(arguments: str) -> str:
    """Return what `parakit plan ARGUMENTS` prints on a terminal of WIDTH columns."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(command, "wide_console", lambda: wide_console(WIDTH))
        assert run_plan(arguments.split()) == 0
    return printed.getvalue()
