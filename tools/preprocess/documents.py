"""Documents out of a block of input, and what is wrong with those that are none.

The rules are those of Megatron's script, which reads with Python's `json`: a line is good if `msgspec`
decodes it, which is fast, or else if `json` does. The verdict on a line follows from that line alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

Text = str | list[str]
"""A document: one text, or its sentences (each becomes a sequence of its own)."""


class ProblemKind(StrEnum):
    """What can be wrong with a document; the values appear in messages and manifests."""

    BROKEN_JSON = "broken JSON line"
    MISSING_KEY = "missing key"
    NULL_TEXT = "null text"
    NOT_TEXT = "value that is no text"
    INVALID_UTF8 = "invalid UTF-8"
    TOO_LARGE = "document over --max-document-mb"
    BROKEN_ARCHIVE = "truncated or damaged archive"
    EMPTY_FILE = "empty file"
    BLANK_LINE = "blank line"
    EMPTY_DOCUMENT = "empty document"


HARMLESS = (ProblemKind.BLANK_LINE, ProblemKind.EMPTY_DOCUMENT)
"""Counted and named, but no reason to stop: Megatron keeps empty documents, so they are kept."""


@dataclass(frozen=True)
class Problem:
    """Why there is no document to use, or what is noteworthy about it."""

    kind: ProblemKind
    detail: str = ""


Row = Sequence[Text] | Problem
"""What a line holds: for each key its text, or what is wrong."""


class Parser:
    """Rows out of the content of blocks, for a fixed set of keys."""

    def __init__(self, keys: Sequence[str], max_bytes: int | None = None) -> None:
        self.keys = tuple(keys)
        self._max_bytes = max_bytes
        fields = [f"k{i}" for i in range(len(keys))]
        row = msgspec.defstruct(
            "Row",
            [(field, str) for field in fields],
            rename=dict(zip(fields, keys, strict=True)),
            gc=False,
        )
        self._decode: Any = msgspec.json.Decoder(row).decode
        self._texts = msgspec.structs.astuple

    def parse(self, content: object) -> list[Row]:
        """One row for each line (of JSON) or row (of a table); a block may also be one problem."""
        if isinstance(content, Problem):
            return [content]
        if isinstance(content, bytes | bytearray):
            rows = self._parse_lines(content)
        else:  # Columns of a table: Arrow arrays, one for each key.
            columns: Any = content
            texts = zip(*(column.to_pylist() for column in columns), strict=True)
            rows = [
                _check_texts(self.keys, dict(zip(self.keys, row, strict=True))) for row in texts
            ]
        if self._max_bytes is not None:
            rows = [self._refuse_large(row, self._max_bytes) for row in rows]
        return rows

    def _parse_lines(self, data: bytes | bytearray) -> list[Row]:
        if b"\r" in data:  # Megatron reads in text mode, where all three line ends count.
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if data.find(b"\n") in (-1, len(data) - 1):  # one line, perhaps a large one: no copy
            return [self._parse_line(data)]
        return [self._parse_line(line) for line in data.removesuffix(b"\n").split(b"\n")]

    def _parse_line(self, line: bytes | bytearray) -> Row:
        try:
            if not line.isascii():
                line.decode()  # `msgspec` does not look into the keys it skips
            texts: tuple[str, ...] = self._texts(self._decode(line))
            return texts
        except (ValueError, RecursionError):
            return self._parse_slowly(line)

    def _parse_slowly(self, line: bytes | bytearray) -> Row:
        """A line that is no object with a text for each key, as Python's `json` reads it."""
        if not line.strip():
            return Problem(ProblemKind.BLANK_LINE)
        try:
            text = line.decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            return Problem(ProblemKind.INVALID_UTF8, f"byte {error.start + 1} of the line")
        try:
            # `len` stands for any integer: Python refuses to read one of over 4,300 digits.
            row = json.loads(text, parse_int=len)
        except (ValueError, RecursionError) as error:
            return Problem(ProblemKind.BROKEN_JSON, str(error))
        if not isinstance(row, dict):
            return Problem(ProblemKind.BROKEN_JSON, "the line is no JSON object")
        return _check_texts(self.keys, row)

    def _refuse_large(self, row: Row, limit: int) -> Row:
        if isinstance(row, Problem):
            return row
        size = max(sum(map(utf8_size, [t] if isinstance(t, str) else t)) for t in row)
        return row if size <= limit else Problem(ProblemKind.TOO_LARGE, f"{size} bytes")


def _check_texts(keys: Sequence[str], row: Mapping[str, Any]) -> Row:
    """The row's texts in the order of the keys, or the first thing wrong with them."""
    texts: list[Text] = []
    for key in keys:
        if key not in row:
            return Problem(ProblemKind.MISSING_KEY, f"'{key}'")
        value = row[key]
        if value is None:
            return Problem(ProblemKind.NULL_TEXT, f"key '{key}'")
        try:
            if isinstance(value, bytes):  # of a table
                value = value.decode()
            sentences = value if isinstance(value, list) else [value]
            if not all(isinstance(sentence, str) for sentence in sentences):
                return Problem(ProblemKind.NOT_TEXT, f"key '{key}' holds {type(value).__name__}")
            for sentence in sentences:
                utf8_size(sentence)
        except UnicodeDecodeError as error:
            return Problem(ProblemKind.INVALID_UTF8, f"byte {error.start + 1} of '{key}'")
        except UnicodeEncodeError:
            return Problem(ProblemKind.INVALID_UTF8, f"key '{key}' holds half a surrogate pair")
        texts.append(value)
    return texts


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
