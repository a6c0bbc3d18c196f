"""Read `.txt` files: one document per file, or one per paragraph. Each document becomes a JSON line.

All lines of a document end in `\\n`. A byte order mark, and empty lines at the start and end of the document, are
dropped.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from tools.preprocess.documents import Problem, ProblemKind
from tools.preprocess.lines import BLOCK_BYTES, Block, Slice

SUFFIX = ".txt"
_BLANK_LINES = re.compile(rb"(?:\r?\n|\r)(?:[ \t]*(?:\r\n|\n|\r))+")
"""The end of a line, followed by one or more blank lines."""


class TextDocuments(StrEnum):
    """Stretch of a `.txt` file that is one document."""

    FILE = "file"
    PARAGRAPH = "paragraph"
    """Lines up to the next blank line."""


def text_blocks(slice_: Slice, offset: int, key: str, documents: TextDocuments) -> Iterator[Block]:
    """Yield the documents of a `.txt` file as blocks of JSON lines with the key `key`.

    The full file is read into memory. If it is not UTF-8, a block describes the problem. A blank file gives no block.

    Args:
        slice_: The file.
        offset: Byte at which to start.
        key: Key of the text in the JSON lines.
        documents: What is a document: the file, or each paragraph.
    """
    raw = Path(slice_.name).read_bytes()
    if documents is TextDocuments.FILE:
        # A blank file gives no block, as an empty file does: by that the reader knows that it is empty.
        if offset < len(raw) and raw.strip():
            yield _make_block([raw], len(raw), key)
        return
    start = offset
    pending: list[bytes] = []
    pending_bytes = 0
    while start < len(raw):
        end = next_start = len(raw)
        blank_lines = _BLANK_LINES.search(raw, start)
        if blank_lines:
            end, next_start = blank_lines.span()
        paragraph = raw[start:end].removeprefix(codecs.BOM_UTF8)
        if paragraph.strip():
            pending.append(paragraph)
            pending_bytes += end - start
        start = next_start
        if pending_bytes >= BLOCK_BYTES:
            yield _make_block(pending, start, key)
            pending, pending_bytes = [], 0
    if pending:
        yield _make_block(pending, len(raw), key)


def _make_block(documents: list[bytes], next_offset: int, key: str) -> Block:
    """Return a block with one JSON line per document. If a document is not UTF-8, the block describes this problem."""
    lines = bytearray()
    for raw in documents:
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            problem = Problem(ProblemKind.INVALID_UTF8, f"byte {error.start + 1} of the document")
            return Block(next_offset, 0, next_offset, problem)
        text = text.replace("\r\n", "\n").replace("\r", "\n").strip("\n")
        lines += msgspec.json.encode({key: text}) + b"\n"
    return Block(next_offset, len(lines), next_offset, bytes(lines))
