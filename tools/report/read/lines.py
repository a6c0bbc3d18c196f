"""A log's bytes as clean lines, whatever is in them.

Invalid UTF-8 is replaced, ANSI escapes and whatever else a terminal would obey are dropped, a carriage
return ends a line as a newline does; a line too long for one piece is cut before an iteration's text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tools.report.read.dialects import line_formats
from tools.report.read.pieces import MAX_LINE, read_chunks

# Those that end a line stay, and so does the escape, which is dropped with its sequence.
_CONTROLS = bytes({*range(0x20), 0x7F} - {*b"\t\n\v\f\r\x1b\x1c\x1d\x1e"})
# C1 controls, and what changes the direction of a text or cannot be seen.
_UNSEEN = re.compile("[\x80-\x84\x86-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_WRAPPED = ('{"log"', '{"message"', '{"msg"')
_BLANKED = dict.fromkeys((*range(32), 127, 133, 8232, 8233), " ")
# Longest escape kept apart is bounded, so that a hostile "\x1b[0;0;0;…" costs one pass.
_ANSI = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])"
)


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
        return [clean(rest)] if rest else []


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
    pieces: list[str] = []
    for line in lines:
        if len(line) > MAX_LINE:
            pieces += _cut(line)
        else:
            pieces.append(line)
    if len(rest) > MAX_LINE:
        *whole, rest = _cut(rest)
        pieces += whole
    return ([clean(piece) for piece in pieces] if "\x1b" in text else pieces), rest


def clean(line: str) -> str:
    """Drop ANSI escapes, and what is left of broken ones."""
    return _ANSI.sub("", line).replace("\x1b", "") if "\x1b" in line else line


def unwrapped(line: str) -> str:
    """The line that a container's log keeps as JSON (`{"log": …}`); any other as it is."""
    if not line.startswith(_WRAPPED):
        return line
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return line
    text = next((found[name] for name in ("log", "message", "msg") if name in found), None)
    return printable(text.rstrip("\r\n")) if isinstance(text, str) else line


def printable(text: str) -> str:
    """A text on one line, without escapes and whatever a terminal or a page would obey."""
    return _UNSEEN.sub("", clean(text)).translate(_BLANKED)


def _cut(line: str) -> list[str]:
    pieces: list[str] = []
    start = 0
    while len(line) - start > MAX_LINE:
        end = _iteration_start(line, start + 1, start + MAX_LINE)
        pieces.append(line[start:end])
        start = end
    pieces.append(line[start:])
    return pieces


def _iteration_start(line: str, low: int, high: int) -> int:
    """Where the last iteration's text in a stretch starts, so that a cut there harms none."""
    for each in line_formats():
        place = line.rfind(each.word, low, high)
        while place >= 0:
            # The mark is also in lines that are no iteration's.
            if each.opening.match(line, place):
                return place
            place = line.rfind(each.word, low, place)
    return high
