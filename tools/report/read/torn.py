"""Lines that were torn in two behind a label of their rank (`srun -l`, `torchrun --tee`), joined again.

A launcher that labels lines writes what it has of a line when its buffer is full, and the rest as a line
of its own behind the same label. Which lines these are shows in what they lack.
"""

from __future__ import annotations

import re

_LABEL = re.compile(r"\s{0,8}(?:\d{1,6}: |\[[A-Za-z]{0,16}\d{1,6}\]:)")
_ARGUMENT = re.compile(r"  [A-Za-z_]\w{0,80} \.{1,60} .")
_BARE = re.compile(r"[\w.,'\[\]+-]{1,40}\Z")
"""The end of a value."""
_UNFINISHED = re.compile(
    r"  [A-Za-z_]\w{0,80} ?\.{0,60} ?\Z"
    r"|\[Rank \d{1,6}\] \((?!.*max reserved: [\d.]).*"
    r"|iteration +\d{1,12}/ *\d{1,12} \|(?!.*max reserved).*(?:[^|]|\| )\Z"
)
"""An argument without its value, memory without its last figure, an iteration without its last bar."""
_MAX_LABELS = 4096
_MAX_LENGTH = 1 << 14


def is_torn(line: str) -> bool:
    """Whether a labelled line is unfinished."""
    label = _LABEL.match(line)
    return label is not None and _UNFINISHED.search(line, label.end()) is not None


class TornLines:
    """Feed it lines; `joined` gives them whole, an unfinished one with what follows it."""

    def __init__(self) -> None:
        self._before: dict[str, str] = {}
        """By label the text of an unfinished line, or of an argument whose value may go on."""

    def joined(self, line: str) -> list[str]:
        """The lines that are complete with this one."""
        label = _LABEL.match(line)
        if label is None or len(line) > _MAX_LENGTH:
            return [line]
        text = line[label.end() :]
        before = self._before.pop(label[0], "")
        waiting = bool(before) and not _ARGUMENT.match(before)
        if before and _goes_on(before, text):
            whole, waiting = before + text, False
        else:
            whole = text
        done = [label[0] + before] if waiting else []
        unfinished = _UNFINISHED.search(whole) is not None
        if (unfinished or _ARGUMENT.match(whole)) and len(self._before) < _MAX_LABELS:
            self._before[label[0]] = whole
        return done if unfinished else [*done, label[0] + whole]

    def left(self) -> list[str]:
        """Unfinished lines that nothing has followed."""
        left = [label + text for label, text in self._before.items() if not _ARGUMENT.match(text)]
        self._before.clear()
        return left


def _goes_on(before: str, text: str) -> bool:
    """Whether a text ends the one before it behind the same label."""
    if _ARGUMENT.match(before):
        return _BARE.match(text) is not None
    whole = before + text
    if before.startswith("  "):
        return not text.startswith(("  ", "---")) and _ARGUMENT.match(whole) is not None
    fresh = text.startswith((" iteration", "iteration", " [", "["))
    return not fresh and _UNFINISHED.search(whole) is None
