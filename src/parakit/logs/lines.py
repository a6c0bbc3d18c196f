"""Split the bytes of a log into clean lines, and join lines that a launcher tore in two.

Invalid UTF-8 is replaced. ANSI escapes and other characters that a terminal would obey are dropped. A carriage
return ends a line like a newline. A line longer than MAX_LINE is cut before the text of an iteration.

A launcher that labels lines with their rank (`srun -l`, `torchrun --tee`) may tear a line. It writes the first part
when its buffer is full. The second part is then a separate line with the same label. A torn line is recognised by its
missing end.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from parakit.logs.dialects import load_line_formats
from parakit.logs.pieces import MAX_LINE, read_chunks

# Control characters but those that end a line, and the escape, which is dropped with its sequence.
_CONTROLS = bytes({*range(0x20), 0x7F} - {*b"\t\n\v\f\r\x1b\x1c\x1d\x1e"})
# C1 controls, invisible characters, and characters that change the direction of a text.
_INVISIBLE = re.compile(
    "[\x80-\x84\x86-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
_JSON_PREFIXES = ('{"log"', '{"message"', '{"msg"')
_BLANKED = dict.fromkeys((*range(32), 127, 133, 8232, 8233, *range(0xD800, 0xE000)), " ")
# The length of an escape is bounded, so that a hostile "\x1b[0;0;0;…" costs one pass.
_ANSI = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])"
)

_LABEL = re.compile(r"\s{0,8}(?:\d{1,6}: |\[[A-Za-z]{0,16}\d{1,6}\]:)")
_ARGUMENT = re.compile(r"  [A-Za-z_]\w{0,80} \.{1,60} .")
_VALUE_END = re.compile(r"[\w.,'\[\]+-]{1,40}\Z")
"""Second part of an argument's value."""
_UNFINISHED = re.compile(
    r"  [A-Za-z_]\w{0,80} ?\.{0,60} ?\Z"
    r"|\[Rank \d{1,6}\] \((?!.*max reserved: [\d.]).*"
    r"|iteration +\d{1,12}/ *\d{1,12} \|(?!.*max reserved).*(?:[^|]|\| )\Z"
)
"""Pattern of a torn line: an argument without value, memory without its last number, an iteration without its
last bar."""
_MAX_LABELS = 4096
_MAX_LENGTH = 1 << 14


class LineSplitter:
    """Splitter of a log's bytes into clean lines.

    `feed` gets the bytes in order, in pieces that may end anywhere. `finish` returns the last line.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""
        """Text after the last line end so far."""

    def feed(self, data: bytes) -> list[tuple[int, str]]:
        """Return the clean lines that end in `data`, each with the number of newlines before it in `data`.

        Empty lines are left out. Bytes after the last line end are kept for the next call.
        """
        text = self._decoder.decode(data.translate(None, _CONTROLS))
        if not text.isascii():
            text = _INVISIBLE.sub("", text)
        text = self._unfinished + text
        lines, self._unfinished = split_lines(text)
        if len(lines) == text.count("\n"):
            return [(number, line) for number, line in enumerate(lines) if line]
        # Some lines end with a carriage return, or are cut because they are too long.
        *complete_lines, last_line = text.split("\n")
        parts_by_line = [split_lines(line + "\n")[0] for line in complete_lines]
        last_parts, self._unfinished = split_lines(last_line)
        parts_by_line.append(last_parts)
        numbered_parts: list[tuple[int, str]] = []
        for number, parts in enumerate(parts_by_line):
            numbered_parts += [(number, part) for part in parts if part]
        return numbered_parts

    def finish(self) -> list[str]:
        """Return the log's last line if no line end follows it; else an empty list."""
        last_line = self._unfinished + self._decoder.decode(b"", final=True)
        self._unfinished = ""
        return [drop_escapes(last_line)] if last_line else []


def read_lines(path: Path) -> Iterator[str]:
    """Yield the clean lines of a plain or compressed log. Empty lines are left out.

    Raises:
        OSError: The file cannot be opened or read.
    """
    splitter = LineSplitter()
    for chunk in read_chunks(path):
        yield from (line for _, line in splitter.feed(chunk))
    yield from splitter.finish()


def split_lines(text: str) -> tuple[list[str], str]:
    """Return the complete lines of a text, and the remaining text after the last line end.

    ANSI escapes are removed. A line longer than MAX_LINE is returned as several lines.
    """
    lines = text.splitlines()
    unfinished = ""
    if lines and text[-1] not in "\r\n":
        unfinished = lines.pop()
    if any(len(line) > MAX_LINE for line in lines):
        lines = [piece for line in lines for piece in _cut_line(line)]
    *complete_pieces, unfinished = _cut_line(unfinished)
    lines += complete_pieces
    if "\x1b" in text:
        lines = [drop_escapes(line) for line in lines]
    return lines, unfinished


def drop_escapes(line: str) -> str:
    """Return a line without its ANSI escapes, complete or broken."""
    return _ANSI.sub("", line).replace("\x1b", "") if "\x1b" in line else line


def unwrap_json(line: str) -> str:
    """Return the text of a line that a container's log has wrapped in JSON, such as `{"log": "text"}`.

    A line that is not wrapped in this way is returned unchanged.
    """
    if not line.startswith(_JSON_PREFIXES):
        return line
    try:
        entry = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return line
    text = next((entry[name] for name in ("log", "message", "msg") if name in entry), None)
    return make_printable(text.rstrip("\r\n")) if isinstance(text, str) else line


def make_printable(text: str) -> str:
    """Return a text on one line, without escapes and other characters that a terminal or a page would obey."""
    return _INVISIBLE.sub("", drop_escapes(text)).translate(_BLANKED)


def is_torn(line: str) -> bool:
    """Return True if a line begins with its rank's label (`3: `) and is cut off, as a launcher tears lines."""
    label = _LABEL.match(line)
    return label is not None and _UNFINISHED.search(line, label.end()) is not None


class TornLines:
    """Joiner of lines that were torn into parts. `join` gets every line and returns the complete lines."""

    def __init__(self) -> None:
        self._before: dict[str, str] = {}
        """Text by label of a line that is torn, or of an argument whose value may continue."""

    def join(self, line: str) -> list[str]:
        """Take the next line of a log, and return the lines that are complete now, in order.

        A line without a label is returned at once. The list is empty if `line` is the first part of a torn line. It
        has two lines if `line` does not continue the earlier part with the same label: the earlier part is then a
        line by itself.
        """
        label = _LABEL.match(line)
        if label is None or len(line) > _MAX_LENGTH:
            return [line]
        text = line[label.end() :]
        complete_lines: list[str] = []
        before = self._before.pop(label[0], "")
        if before and self._is_continuation(before, text):
            text = before + text
        elif before and not _ARGUMENT.match(before):
            # An argument was returned before, because its value may be complete.
            complete_lines.append(label[0] + before)
        is_unfinished = _UNFINISHED.search(text) is not None
        may_continue = is_unfinished or _ARGUMENT.match(text) is not None
        if may_continue and len(self._before) < _MAX_LABELS:
            self._before[label[0]] = text
        if not is_unfinished:
            complete_lines.append(label[0] + text)
        return complete_lines

    def flush(self) -> list[str]:
        """Return the first parts of torn lines that no second part has followed, and forget all lines."""
        torn_lines = [
            label + text for label, text in self._before.items() if not _ARGUMENT.match(text)
        ]
        self._before.clear()
        return torn_lines

    @staticmethod
    def _is_continuation(before: str, text: str) -> bool:
        """Return True if `text` continues the unfinished line `before`. Both must have the same label."""
        if _ARGUMENT.match(before):
            return _VALUE_END.match(text) is not None
        joined = before + text
        if before.startswith("  "):
            is_new_line = text.startswith(("  ", "---"))
            return not is_new_line and _ARGUMENT.match(joined) is not None
        is_new_line = text.startswith((" iteration", "iteration", " [", "["))
        return not is_new_line and _UNFINISHED.search(joined) is None


def _cut_line(line: str) -> list[str]:
    """Return a line cut into pieces of at most MAX_LINE characters.

    If an iteration begins in a piece and would be cut, the piece ends before it.
    """
    pieces: list[str] = []
    start = 0
    while len(line) - start > MAX_LINE:
        end = _find_last_iteration(line, start + 1, start + MAX_LINE) or start + MAX_LINE
        pieces.append(line[start:end])
        start = end
    return [*pieces, line[start:]]


def _find_last_iteration(line: str, start: int, stop: int) -> int | None:
    """Return the index at which the last iteration between `start` and `stop` begins; None if there is none."""
    for line_format in load_line_formats():
        index = line.rfind(line_format.word, start, stop)
        # The word of a format is also in lines that are no iterations.
        while index >= 0 and not line_format.opening.match(line, index):
            index = line.rfind(line_format.word, start, index)
        if index >= 0:
            return index
    return None
