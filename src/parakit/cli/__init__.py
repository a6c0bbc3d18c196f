"""The table of commands, and the program that runs them.

This package decides the names of commands and variables, and how options and variables become arguments of a
handler. `make TARGET` and `parakit COMMAND` are two ways to the same program.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.cli.dispatch import run_command
    from parakit.cli.help import HEADINGS, list_variables
    from parakit.cli.program import main
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "HEADINGS",
    "list_variables",
    "main",
    "run_command",
]
