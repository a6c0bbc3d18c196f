"""Refuses the module names of earlier versions with the names of today."""

import sys
from typing import NoReturn

COMMANDS = {"plan": "parakit plan", "report": "parakit report", "cli": "parakit"}


def refuse(module: str) -> NoReturn:
    """Print the command that replaces `python -m tools.MODULE` on stderr, and exit with 2."""
    command = COMMANDS[module]
    print(
        f"'python -m tools.{module}' is '{command}' now: .venv/bin/python -m {command} …",
        file=sys.stderr,
    )
    raise SystemExit(2)
