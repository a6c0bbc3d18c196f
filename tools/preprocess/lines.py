"""Slices of inputs, and those of JSON lines, plain or compressed, as blocks of about `BLOCK_BYTES`.

The cuts follow from the offset a stream is read from, so a resumed run sees the same blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from tools.preprocess.documents import Problem, ProblemKind

BLOCK_BYTES = 4 << 20
"""Text parsed and encoded at a time; a longer line makes a longer block."""
_READ_BYTES = 1 << 20
_ARCHIVE_READ_BYTES = 1 << 18
"""Read from an archive at a time: what precedes damage is lost only up to this much."""
_LONGEST_ESCAPE = 6
"""Bytes of JSON for one byte of text, at most: `\\u0041`."""


class Format(StrEnum):
    """How an input holds its documents."""

    LINES = "JSON lines"
    GZIP = "gzip"
    ZSTD = "zstd"
    PARQUET = "parquet"
    HUB = "hub"


@dataclass(frozen=True)
class Slice:
    """A stretch of one input: bytes of (uncompressed) JSON lines, or rows of a table."""

    name: str
    format: Format
    start: int
    stop: int | None
    """None is the input's end."""
    size_bytes: int
    """Of the stretch as stored, for the progress line; 0 if not known."""


@dataclass(frozen=True)
class Block:
    """Some whole lines, or some rows, of a slice; or one thing wrong with the input itself."""

    next_offset: int
    """Byte (of the uncompressed text) or row that the block after this one starts at."""
    size_bytes: int
    """Text in it."""
    read_bytes: int
    """How far the slice, or from `InputStream` the input, is read as stored."""
    content: object
    """JSON lines as bytes, Arrow columns, or a `Problem`."""
    slice_index: int = 0
    """Set by `InputStream`."""


def line_blocks(slice_: Slice, offset: int, limit: int | None) -> Iterator[Block]:
    """Blocks of a slice.

    Args:
        slice_: Of JSON lines.
        offset: Byte (of the uncompressed text) to start at; a line starts there.
        limit: Largest document in bytes; of a line that must hold a larger one, only the end is
            looked for.
    """
    longest = None if limit is None else _LONGEST_ESCAPE * limit + BLOCK_BYTES
    is_archive = slice_.format is not Format.LINES
    buffer = bytearray()
    with Path(slice_.name).open("rb") as stored:
        text = stored if not is_archive else _decompressed(stored, slice_.format)
        pieces = _pieces(slice_, text, offset)
        try:
            while True:
                cut, dropped = _next_cut(buffer, pieces, longest)
                if not cut:
                    return
                rest = buffer[cut:]
                del buffer[cut:]
                size = dropped + cut
                offset += size
                if longest is not None and size > longest:
                    problem = Problem(ProblemKind.TOO_LARGE, f"{size} bytes")
                    yield Block(offset, 0, stored.tell() - slice_.start, problem)
                else:
                    # A long line stays a bytearray, which is emptied as soon as it is parsed.
                    data = bytes(buffer) if size <= BLOCK_BYTES else buffer
                    yield Block(offset, size, stored.tell() - slice_.start, data)
                buffer = rest
        except OSError as error:
            if not is_archive:
                raise
            cut = buffer.rfind(b"\n") + 1
            if cut:
                yield Block(offset + cut, cut, stored.tell(), bytes(buffer[:cut]))
            problem = Problem(ProblemKind.BROKEN_ARCHIVE, str(error))
            yield Block(offset + cut, 0, stored.tell(), problem)


def _next_cut(buffer: bytearray, pieces: Iterator[bytes], longest: int | None) -> tuple[int, int]:
    """Read a block of whole lines, or one long line, into the buffer.

    Returns:
        Where it ends in the buffer, 0 at the input's end; and how much of a line that is longer than
        `longest` was dropped before.
    """
    while len(buffer) < BLOCK_BYTES and (piece := next(pieces, b"")):
        buffer += piece
    cut = buffer.rfind(b"\n", 0, BLOCK_BYTES) + 1 or buffer.find(b"\n") + 1
    dropped = 0
    while not cut and (piece := next(pieces, b"")):
        if longest is not None and len(buffer) > longest:
            dropped += len(buffer)
            buffer.clear()
        start = len(buffer)
        buffer += piece
        cut = buffer.find(b"\n", start) + 1
    return cut or len(buffer), dropped


def _decompressed(stored: BinaryIO, format_: Format) -> Any:
    import pyarrow  # slow, and plain files do without

    return pyarrow.CompressedInputStream(stored, format_.value)


def _pieces(slice_: Slice, text: Any, offset: int) -> Iterator[bytes]:
    """The text from `offset` on; an archive has to be read up to there."""
    if slice_.format is Format.LINES:
        text.seek(offset)
        while piece := text.read(min(_READ_BYTES, (slice_.stop or 1 << 62) - text.tell())):
            yield piece
        return
    while piece := text.read(_ARCHIVE_READ_BYTES):
        if offset < len(piece):
            yield piece[offset:]
        offset = max(0, offset - len(piece))


@functools.cache
def lines_before(slice_: Slice) -> int:
    """Number of lines (or rows) of the file before the slice; of lines it reads all."""
    if slice_.format is not Format.LINES or not slice_.start:
        return slice_.start
    count = 0
    for block in line_blocks(Slice(slice_.name, slice_.format, 0, slice_.start, 0), 0, None):
        data = block.content
        assert isinstance(data, bytes | bytearray)
        count += data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
    return count


def next_line_start(path: Path, offset: int) -> int:
    """Where the first line starts that starts at `offset` or after it."""
    with path.open("rb") as stream:
        if offset > 0:
            stream.seek(offset - 1)
            while (piece := stream.readline(_READ_BYTES)) and not piece.endswith(b"\n"):
                pass
        return stream.tell()
