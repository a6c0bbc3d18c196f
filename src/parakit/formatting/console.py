"""The console of a command, which writes texts in the spelling of the command's caller."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from parakit.formatting.caller import spell_for_caller


class CallerConsole(Console):
    """A console whose texts name variables and commands as the caller of the command writes them.

    Tables, Markdown and other objects of rich are printed as they are.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects as rich does, after rewriting those that are texts."""
        texts = (spell_for_caller(item) if isinstance(item, str) else item for item in objects)
        super().print(*texts, **options)
