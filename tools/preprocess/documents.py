"""Parse blocks of input into documents, and say what is wrong with lines that hold none.

The rules are taken from Megatron's script, which reads with Python's `json`. A line is tried with `msgspec` first,
which is fast, and then with `json`. The result for a line depends on that line alone.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

Text = str | list[str]
"""A document: one text, or its sentences (each becomes a sequence of its own)."""


class ProblemKind(StrEnum):
    """Kind of a problem with a document or an input. The values appear in messages and manifests."""

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
"""Problems that are counted and named, but do not stop a run. Empty documents are kept, as Megatron keeps them."""


@dataclass(frozen=True)
class Problem:
    """Reason why a line holds no usable document, or a remark on its document."""

    kind: ProblemKind
    detail: str = ""


ADVICE = {
    ProblemKind.EMPTY_FILE: "take it out of --input, or fetch it again",
    ProblemKind.BROKEN_ARCHIVE: "fetch it again; --on-error skip keeps the documents before the damage",
}
"""Advice on problems with a file. It holds no document that could be corrected."""

Row = Sequence[Text] | Problem
"""Content of a line: a text per key, or the problem with the line."""


class Parser:
    """Parser of blocks into rows, for a fixed list of keys."""

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
        """Return one row per line of JSON, or per row of a table.

        A row has the texts of the parser's keys. For a line that cannot be used, the row is a Problem.

        Args:
            content: `Block.content`: lines of JSON, columns of a table, or a Problem, which is returned as the only
                row.
        """
        match content:
            case Problem():
                return [content]
            case bytes() | bytearray():
                rows = self._parse_lines(content)
            case _:
                rows = self._parse_columns(content)
        if self._max_bytes is not None:
            rows = [self._refuse_large(row, self._max_bytes) for row in rows]
        return rows

    def _parse_columns(self, columns: Any) -> list[Row]:
        """Return the rows of a table.

        Args:
            columns: One Arrow array per key, in the order of the keys.
        """
        values_by_key = [column.to_pylist() for column in columns]
        rows = []
        for values in zip(*values_by_key, strict=True):
            rows.append(_check_texts(self.keys, dict(zip(self.keys, values, strict=True))))
        return rows

    def _parse_lines(self, data: bytes | bytearray) -> list[Row]:
        """Return a row per line of JSON."""
        if b"\r" in data:  # Megatron reads in text mode, where all three line ends count.
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if data.find(b"\n") in (-1, len(data) - 1):  # A single line may be large: do not copy it.
            return [self._parse_line(data)]
        return [self._parse_line(line) for line in data.removesuffix(b"\n").split(b"\n")]

    def _parse_line(self, line: bytes | bytearray) -> Row:
        """Return the texts of a line of JSON, or a Problem if the line cannot be used."""
        try:
            if not line.isascii():
                line.decode()  # Raises for invalid UTF-8, which `msgspec` overlooks in keys that it skips.
            texts: tuple[str, ...] = self._texts(self._decode(line))
            return texts
        except (ValueError, RecursionError):
            return self._parse_slowly(line)

    def _parse_slowly(self, line: bytes | bytearray) -> Row:
        """Return the row of a line that msgspec refuses.

        Python's `json` reads the line, and may accept it. A line that `json` refuses too gives a Problem.
        """
        # Windows programs write this mark at the start of a file. It belongs to no document.
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            return Problem(ProblemKind.BLANK_LINE)
        try:
            text = line.decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            return Problem(ProblemKind.INVALID_UTF8, f"byte {error.start + 1} of the line")
        try:
            # Integers are not needed, and Python refuses those of over 4,300 digits: `len` reads them all.
            row = json.loads(text, parse_int=len)
        except (ValueError, RecursionError) as error:
            return Problem(ProblemKind.BROKEN_JSON, str(error))
        if not isinstance(row, dict):
            return Problem(ProblemKind.BROKEN_JSON, "the line is no JSON object")
        return _check_texts(self.keys, row)

    def _refuse_large(self, row: Row, limit: int) -> Row:
        """Return the row, or a problem if one of its documents has more than `limit` bytes."""
        if isinstance(row, Problem):
            return row
        size = max(sum(map(utf8_size, [text] if isinstance(text, str) else text)) for text in row)
        return row if size <= limit else Problem(ProblemKind.TOO_LARGE, f"{size} bytes")


def _check_texts(keys: Sequence[str], row: Mapping[str, Any]) -> Row:
    """Return the texts of a row in the order of the keys, or the first Problem that one of them has."""
    texts: list[Text] = []
    for key in keys:
        if key not in row:
            return Problem(ProblemKind.MISSING_KEY, f"'{key}'")
        text = _check_text(key, row[key])
        if isinstance(text, Problem):
            return text
        texts.append(text)
    return texts


def _check_text(key: str, value: Any) -> Text | Problem:
    """Return the text or the sentences that a key holds, or the Problem with them."""
    if value is None:
        return Problem(ProblemKind.NULL_TEXT, f"key '{key}'")
    text = value
    if isinstance(value, bytes):  # Tables give bytes.
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            return Problem(ProblemKind.INVALID_UTF8, f"byte {error.start + 1} of '{key}'")
    sentences = text if isinstance(text, list) else [text]
    if not all(isinstance(sentence, str) for sentence in sentences):
        return Problem(ProblemKind.NOT_TEXT, f"key '{key}' holds {type(text).__name__}")
    try:
        for sentence in sentences:
            utf8_size(sentence)
    except UnicodeEncodeError:
        return Problem(ProblemKind.INVALID_UTF8, f"key '{key}' holds half a surrogate pair")
    checked: Text = text
    return checked


def utf8_size(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
