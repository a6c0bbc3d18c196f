"""Cut JSON lines, plain or compressed, and plain text into blocks of about `BLOCK_BYTES`.

A slice is a stretch of one input. The cuts depend only on the offset from which a slice is read, so a resumed run
sees the same blocks.
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
"""Bytes of text that are parsed and encoded at a time; a longer line makes a longer block."""
_READ_BYTES = 1 << 20
_ARCHIVE_READ_BYTES = 1 << 18
"""Bytes per read of an archive: at most this much text before a damaged place is lost."""
_LONGEST_ESCAPE = 6
"""Largest number of bytes of JSON per byte of text: `\\u0041` is one byte."""


class Format(StrEnum):
    """Format in which an input stores its documents."""

    LINES = "JSON lines"
    TEXT = "plain text"
    GZIP = "gzip"
    ZSTD = "zstd"
    PARQUET = "parquet"
    HUB = "hub"


@dataclass(frozen=True)
class Slice:
    """Range of one input: bytes of uncompressed JSON lines, or rows of a table."""

    name: str
    format: Format
    start: int
    stop: int | None
    """End of the stretch; None is the input's end."""
    size_bytes: int
    """Stored bytes of the stretch, for the progress line; 0 if unknown."""


@dataclass(frozen=True)
class Block:
    """Some complete lines or some rows of a slice. A block may also describe a problem with the input itself."""

    next_offset: int
    """Byte (of the uncompressed text) or row at which the next block starts."""
    size_bytes: int
    """Bytes of text in the block."""
    read_bytes: int
    """Stored bytes that were read so far: of the slice, or in blocks of `InputStream` of all inputs."""
    content: object
    """JSON lines as bytes, Arrow columns, or a `Problem`."""
    slice_index: int = 0
    """Position of the slice among all slices; set by `InputStream`."""


def line_blocks(slice_: Slice, offset: int, limit: int | None) -> Iterator[Block]:
    """Read a slice of JSON lines, and yield it as blocks of complete lines.

    If an archive is damaged, the last block describes the problem.

    Args:
        slice_: A slice of JSON lines.
        offset: Byte of the uncompressed text at which to start. A line must start there.
        limit: Largest document in bytes, or None without a limit. If a line is so long that its document must be
            larger, a block with a problem replaces the line.
    """
    longest = None if limit is None else _LONGEST_ESCAPE * limit + BLOCK_BYTES
    is_archive = slice_.format is not Format.LINES
    buffer = bytearray()
    with Path(slice_.name).open("rb") as stored:
        text = _decompress(stored, slice_.format) if is_archive else stored
        pieces = _read_pieces(slice_, text, offset)
        try:
            while True:
                cut, dropped = _next_cut(buffer, pieces, longest)
                if not cut:
                    return
                remaining = buffer[cut:]
                del buffer[cut:]
                size = dropped + cut
                offset += size
                read_bytes = stored.tell() - slice_.start
                yield _make_line_block(buffer, offset, size, read_bytes, longest)
                buffer = remaining
        except OSError as error:
            if not is_archive:
                raise
            yield from _make_damage_blocks(buffer, offset, stored.tell(), error)


def _make_line_block(
    lines: bytearray, end: int, size: int, read_bytes: int, longest: int | None
) -> Block:
    """Return the block of some complete lines, or of one long line.

    Args:
        lines: The lines.
        end: Byte of the uncompressed text at which the lines end.
        size: Bytes of the lines, with those of a long line that were dropped.
        read_bytes: Stored bytes that were read so far.
        longest: Bytes of a line above which a problem replaces the line; None without a limit.
    """
    if longest is not None and size > longest:
        return Block(end, 0, read_bytes, Problem(ProblemKind.TOO_LARGE, f"{size} bytes"))
    # A long line stays a bytearray, which is emptied as soon as it is parsed.
    content = bytes(lines) if size <= BLOCK_BYTES else lines
    return Block(end, size, read_bytes, content)


def _make_damage_blocks(
    buffer: bytearray, offset: int, read_bytes: int, error: OSError
) -> Iterator[Block]:
    """Yield the complete lines before the damage of an archive, if there are any, and a block with the problem.

    Args:
        buffer: Text that was read and is in no block yet.
        offset: Byte of the uncompressed text at which the buffer starts.
        read_bytes: Stored bytes that were read so far.
        error: The error that reports the damage.
    """
    complete = buffer.rfind(b"\n") + 1
    if complete:
        yield Block(offset + complete, complete, read_bytes, bytes(buffer[:complete]))
    problem = Problem(ProblemKind.BROKEN_ARCHIVE, str(error))
    yield Block(offset + complete, 0, read_bytes, problem)


def _next_cut(buffer: bytearray, pieces: Iterator[bytes], longest: int | None) -> tuple[int, int]:
    """Read a block of complete lines, or one long line, into the buffer.

    Returns:
        Two numbers. The first is the position in the buffer at which the block ends, or 0 at the end of the input. The
        second is the number of dropped bytes. Bytes are dropped if a line is longer than `longest`. The buffer then
        holds only the end of the line.
    """
    while len(buffer) < BLOCK_BYTES:
        piece = next(pieces, b"")
        if not piece:
            break
        buffer += piece
    cut = buffer.rfind(b"\n", 0, BLOCK_BYTES) + 1  # The sum is 0 if no line ends there.
    if not cut:
        cut = buffer.find(b"\n") + 1
    if cut:
        return cut, 0
    return _read_to_line_end(buffer, pieces, longest)


def _read_to_line_end(
    buffer: bytearray, pieces: Iterator[bytes], longest: int | None
) -> tuple[int, int]:
    """Read the rest of a line whose start fills the buffer. The result has the form of `_next_cut`'s result."""
    dropped = 0
    for piece in pieces:
        if longest is not None and len(buffer) > longest:
            dropped += len(buffer)
            buffer.clear()
        start = len(buffer)
        buffer += piece
        cut = buffer.find(b"\n", start) + 1
        if cut:
            return cut, dropped
    return len(buffer), dropped


def _decompress(stored: BinaryIO, format_: Format) -> Any:
    """Return a stream of the decompressed text of an archive."""
    import pyarrow  # Slow to import, and not needed for plain files.

    return pyarrow.CompressedInputStream(stored, format_.value)


def _read_pieces(slice_: Slice, text: Any, offset: int) -> Iterator[bytes]:
    """Yield the text of a slice from byte `offset` on, in pieces.

    An archive can only be read from its start, so its text before `offset` is read and dropped.
    """
    if slice_.format is Format.LINES:
        text.seek(offset)
        while True:
            size = _READ_BYTES
            if slice_.stop is not None:
                size = min(size, slice_.stop - text.tell())
            piece = text.read(size)
            if not piece:
                return
            yield piece
        return
    before = offset  # Bytes that are still to be dropped.
    while piece := text.read(_ARCHIVE_READ_BYTES):
        if before < len(piece):
            yield piece[before:]
        before = max(0, before - len(piece))


@functools.cache
def lines_before(slice_: Slice) -> int:
    """Return the number of lines, or of rows of a table, before the slice in its file.

    The lines before the slice are read to count them.
    """
    if slice_.format is not Format.LINES or not slice_.start:
        return slice_.start
    count = 0
    for block in line_blocks(Slice(slice_.name, slice_.format, 0, slice_.start, 0), 0, None):
        data = block.content
        assert isinstance(data, bytes | bytearray)
        count += data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
    return count


def next_line_start(path: Path, offset: int) -> int:
    """Return the offset of the first line that starts at `offset` or after it."""
    with path.open("rb") as stream:
        if offset > 0:
            stream.seek(offset - 1)
            while (piece := stream.readline(_READ_BYTES)) and not piece.endswith(b"\n"):
                pass
        return stream.tell()
