"""Documents out of a block of input, and what is wrong with those that are none.

The rules are those of Megatron's script, which reads with Python's `json`: a line is good if `msgspec`
decodes it, which is fast, or else if `json` does. The verdict on a line follows from that line alone.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

Text = str | list[str]
"""A document: one text, or its sentences (each becomes a sequence of its own)."""

_UTF8_STRIDE = 1 << 20


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
    """One document that cannot be used, or is noteworthy."""

    kind: ProblemKind
    line: int
    """Line (or row) within the block, from 0."""
    detail: str = ""


@dataclass(frozen=True)
class Documents:
    """What one block holds: for each key, the text of every usable document."""

    columns: tuple[Sequence[Text], ...]
    lines: Sequence[int]
    """For each document, its line within the block, from 0."""
    line_count: int
    problems: tuple[Problem, ...] = ()


class LineParser:
    """Parses blocks of JSON lines for a fixed set of keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(keys)
        names = [f"k{i}" for i in range(len(keys))]
        row = msgspec.defstruct(
            "Row",
            [(name, str) for name in names],
            rename=dict(zip(names, keys, strict=True)),
            gc=False,
        )
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(row)
        self._names = names

    def parse(self, data: bytes | bytearray) -> Documents:
        """Parse whole lines."""
        if b"\r" in data:  # Megatron reads in text mode, where all three line ends count.
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = _split_lines(data)
        is_utf8 = _is_utf8(data)
        rows = self._decode_all(lines) if is_utf8 else None
        if rows is None:
            return _collect(
                self._keys, (self._parse_line(line, at, is_utf8) for at, line in enumerate(lines))
            )
        columns = tuple([getattr(row, name) for row in rows] for name in self._names)
        return Documents(columns, range(len(rows)), len(rows))

    def _decode_all(self, lines: Sequence[bytes | bytearray]) -> list[Any] | None:
        """All rows of faultless lines, else None."""
        decode = self._decoder.decode
        try:
            return [decode(line) for line in lines]
        except _REFUSED:
            return None

    def _parse_line(
        self, line: bytes | bytearray, number: int, is_utf8: bool
    ) -> list[Text] | Problem:
        if not line.strip():
            return Problem(ProblemKind.BLANK_LINE, number)
        try:
            text = "" if is_utf8 else line.decode()
        except UnicodeDecodeError as error:
            return Problem(ProblemKind.INVALID_UTF8, number, f"byte {error.start + 1} of the line")
        try:
            decoded = self._decoder.decode(line)
            return [getattr(decoded, name) for name in self._names]
        except _REFUSED:
            pass
        try:
            # `len` stands for any integer: Python refuses to read one of over 4,300 digits.
            row = json.loads((text or line.decode()).removesuffix("\n"), parse_int=len)
        except (ValueError, RecursionError) as error:
            return Problem(ProblemKind.BROKEN_JSON, number, str(error))
        if not isinstance(row, dict):
            return Problem(ProblemKind.BROKEN_JSON, number, "the line is no JSON object")
        return check_texts(self._keys, row.get, number)


def parse_rows(keys: Sequence[str], columns: Sequence[Sequence[Any]]) -> Documents:
    """Documents out of columns that a library has decoded (parquet, the hub)."""
    rows = (dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True))
    return _collect(keys, (check_texts(keys, row.get, at) for at, row in enumerate(rows)))


def _collect(keys: Sequence[str], results: Iterable[list[Text] | Problem]) -> Documents:
    """Documents and problems apart, one result a line."""
    columns: tuple[list[Text], ...] = tuple([] for _ in keys)
    numbers: list[int] = []
    problems: list[Problem] = []
    count = 0
    for count, result in enumerate(results, start=1):
        if isinstance(result, Problem):
            problems.append(result)
            continue
        numbers.append(count - 1)
        for column, text in zip(columns, result, strict=True):
            column.append(text)
    return Documents(columns, numbers, count, tuple(problems))


def refuse_large(documents: Documents, limit: int) -> Documents:
    """Documents without those of which a text is larger than `limit` bytes."""
    sizes = [max(map(_size, texts)) for texts in zip(*documents.columns, strict=True)]
    if max(sizes, default=0) <= limit:
        return documents
    kept = [index for index, size in enumerate(sizes) if size <= limit]
    refused = tuple(
        Problem(ProblemKind.TOO_LARGE, line, f"{size} bytes")
        for line, size in zip(documents.lines, sizes, strict=True)
        if size > limit
    )
    return Documents(
        columns=tuple([column[index] for index in kept] for column in documents.columns),
        lines=[documents.lines[index] for index in kept],
        line_count=documents.line_count,
        problems=(*documents.problems, *refused),
    )


def check_texts(
    keys: Sequence[str], get: Callable[[str, object], Any], number: int
) -> list[Text] | Problem:
    """The row's texts in the order of the keys, or the first thing wrong with them."""
    texts: list[Text] = []
    for key in keys:
        value = get(key, _MISSING)
        if value is _MISSING:
            return Problem(ProblemKind.MISSING_KEY, number, f"'{key}'")
        if value is None:
            return Problem(ProblemKind.NULL_TEXT, number, f"key '{key}'")
        if isinstance(value, bytes):  # of a table: a binary column, or text that is not UTF-8
            try:
                value = value.decode()
            except UnicodeDecodeError as error:
                return Problem(
                    ProblemKind.INVALID_UTF8, number, f"byte {error.start + 1} of '{key}'"
                )
        sentences = value if isinstance(value, list) else [value]
        if not all(isinstance(sentence, str) for sentence in sentences):
            return Problem(
                ProblemKind.NOT_TEXT, number, f"key '{key}' holds {type(value).__name__}"
            )
        try:
            for sentence in sentences:
                utf8_size(sentence)
        except UnicodeEncodeError:
            return Problem(
                ProblemKind.INVALID_UTF8, number, f"key '{key}' holds half a surrogate pair"
            )
        texts.append(value)
    return texts


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8, found without a copy of a large one."""
    if text.isascii():
        return len(text)
    starts = range(0, len(text), _UTF8_STRIDE)
    return sum(len(text[start : start + _UTF8_STRIDE].encode()) for start in starts)


_MISSING = object()
_REFUSED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _split_lines(data: bytes | bytearray) -> Sequence[bytes | bytearray]:
    end = data.find(b"\n")
    if end in (-1, len(data) - 1):  # one line, perhaps a large one: no copy
        return [data]
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _size(text: Text) -> int:
    return sum(map(utf8_size, [text] if isinstance(text, str) else text))


def _is_utf8(data: bytes | bytearray) -> bool:
    """Whether all of it is valid UTF-8: `msgspec` does not look into the keys it skips."""
    if data.isascii():
        return True
    view, start = memoryview(data), 0
    try:
        while start < len(view):
            piece = view[start : start + _UTF8_STRIDE]
            start += codecs.utf_8_decode(piece, "strict", start + len(piece) == len(view))[1]
    except UnicodeDecodeError:
        return False
    return True
