"""Write the variables of make that a text names in another spelling: as options, or as arguments of Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from parakit.config.settings import Setting

Writer = Callable[[Setting, str | None], str]
"""Function that writes a variable with its value. The value is empty in `NAME=`, and None if the text has the name
alone.
"""

_NAMED = re.compile(
    r'"[^"]*"'
    r"|\b(?P<name>[A-Z][A-Z_0-9]*)=(?P<value>\"[^\"]*\"|[^\s\"',;:()]*)"
    r"|\b(?P<subject>[A-Z][A-Z_0-9]+)(?=:| (?:has|begins|cannot) )"
)


def rewrite_variables(text: str, settings: Iterable[Setting], write: Writer) -> str:
    """Return a text with every variable of make as `write` spells it: `GPUS=2` may become `--gpus 2`.

    A name without a value counts where it is the subject of a sentence, such as `EXTRA has …`. Words in double
    quotes and names that are no variables are not changed.

    Args:
        text: The text.
        settings: The variables. If two have one name, the first counts.
        write: Function that returns the new spelling.
    """
    by_name: dict[str, Setting] = {}
    for setting in settings:
        by_name.setdefault(setting.name, setting)

    def rewrite_match(match: re.Match[str]) -> str:
        setting, value = by_name.get(match["name"] or match["subject"]), match["value"]
        if setting is None:
            return match[0]
        if value is None:
            return write(setting, None)
        # A variable may end its sentence; the full stop is no value.
        end = value[-1:] if value[-1:] in (".", "?") else ""
        return write(setting, value.removesuffix(end)) + end

    return _NAMED.sub(rewrite_match, text)
