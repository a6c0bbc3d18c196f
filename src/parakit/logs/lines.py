"""A log's bytes as clean lines, whatever is in them.

Invalid UTF-8 is replaced, ANSI escapes and whatever else a terminal would obey are dropped, a carriage
return ends a line as a newline does; a line too long for one piece is cut before an iteration's text.

Lines that were torn in two behind a label of their rank (`srun -l`, `torchrun --tee`) are joined: a
launcher that labels lines writes what it has of a line when its buffer is full, and the rest as a line
of its own behind the same label. Which lines these are shows in what they lack.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from parakit.logs.dialects import load_line_formats
from parakit.logs.pieces import MAX_LINE, read_chunks

# Those that end a line stay, and so does the escape, which is dropped with its sequence.
_CONTROLS = bytes({*range(0x20), 0x7F} - {*b"\t\n\v\f\r\x1b\x1c\x1d\x1e"})
# C1 controls, and what changes the direction of a text or cannot be seen.
_UNSEEN = re.compile("[\x80-\x84\x86-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_WRAPPED = ('{"log"', '{"message"', '{"msg"')
_BLANKED = dict.fromkeys((*range(32), 127, 133, 8232, 8233, *range(0xD800, 0xE000)), " ")
# Longest escape kept apart is bounded, so that a hostile "\x1b[0;0;0;…" costs one pass.
_ANSI = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])"
)

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


class LineSplitter:
    """Cuts bytes into clean lines, wherever they are cut themselves."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[tuple[int, str]]:
        """The lines that end in these bytes, each behind how many newlines; empty ones are left out."""
        text = self._decoder.decode(data.translate(None, _CONTROLS))
        text = self._rest + (text if text.isascii() else _UNSEEN.sub("", text))
        lines, self._rest = split_lines(text)
        if len(lines) == text.count("\n"):
            return [(place, line) for place, line in enumerate(lines) if line]
        # Some end otherwise (a carriage return), or are too long for one piece.
        *whole, rest = text.split("\n")
        parts = [split_lines(line + "\n")[0] for line in whole]
        last, self._rest = split_lines(rest)
        return [(at, line) for at, part in enumerate([*parts, last]) for line in part if line]

    def finish(self) -> list[str]:
        """The last line, if no line end followed it."""
        rest = self._rest + self._decoder.decode(b"", final=True)
        self._rest = ""
        return [drop_escapes(rest)] if rest else []


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log, plain or compressed; empty ones are left out.

    Raises:
        OSError: The file cannot be opened or read.
    """
    splitter = LineSplitter()
    for chunk in read_chunks(path):
        yield from (line for _, line in splitter.feed(chunk))
    yield from splitter.finish()


def split_lines(text: str) -> tuple[list[str], str]:
    """Split text into complete, clean lines and the unfinished rest."""
    lines = text.splitlines()
    rest = lines.pop() if lines and text[-1] not in "\r\n" else ""
    if any(len(line) > MAX_LINE for line in lines):
        lines = [piece for line in lines for piece in _cut(line)]
    *whole, rest = _cut(rest)
    lines += whole
    return ([drop_escapes(line) for line in lines] if "\x1b" in text else lines), rest


def drop_escapes(line: str) -> str:
    """Drop ANSI escapes, and what is left of broken ones."""
    return _ANSI.sub("", line).replace("\x1b", "") if "\x1b" in line else line


def unwrap_json(line: str) -> str:
    """The line that a container's log keeps as JSON (`{"log": …}`); any other as it is."""
    if not line.startswith(_WRAPPED):
        return line
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return line
    text = next((found[name] for name in ("log", "message", "msg") if name in found), None)
    return make_printable(text.rstrip("\r\n")) if isinstance(text, str) else line


def make_printable(text: str) -> str:
    """A text on one line, without escapes and whatever a terminal or a page would obey."""
    return _UNSEEN.sub("", drop_escapes(text)).translate(_BLANKED)


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
        if before and self._goes_on(before, text):
            text, waiting = before + text, False
        done = [label[0] + before] if waiting else []
        unfinished = _UNFINISHED.search(text) is not None
        if (unfinished or _ARGUMENT.match(text)) and len(self._before) < _MAX_LABELS:
            self._before[label[0]] = text
        return done if unfinished else [*done, label[0] + text]

    def left(self) -> list[str]:
        """Unfinished lines that nothing has followed."""
        left = [label + text for label, text in self._before.items() if not _ARGUMENT.match(text)]
        self._before.clear()
        return left

    @staticmethod
    def _goes_on(before: str, text: str) -> bool:
        """Whether a text ends the one before it behind the same label."""
        if _ARGUMENT.match(before):
            return _BARE.match(text) is not None
        whole = before + text
        if before.startswith("  "):
            return not text.startswith(("  ", "---")) and _ARGUMENT.match(whole) is not None
        fresh = text.startswith((" iteration", "iteration", " [", "["))
        return not fresh and _UNFINISHED.search(whole) is None


def _cut(line: str) -> list[str]:
    """Pieces of a long line, cut where the last iteration's text in a piece starts, which harms none."""
    pieces: list[str] = []
    start = 0
    while len(line) - start > MAX_LINE:
        end = start + MAX_LINE
        for each in load_line_formats():
            place = line.rfind(each.word, start + 1, start + MAX_LINE)
            # The mark is also in lines that are no iteration's.
            while place >= 0 and not each.opening.match(line, place):
                place = line.rfind(each.word, start + 1, place)
            if place >= 0:
                end = place
                break
        pieces.append(line[start:end])
        start = end
    return [*pieces, line[start:]]
