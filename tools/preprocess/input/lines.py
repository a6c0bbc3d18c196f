"""JSON lines, plain or compressed, as blocks of whole lines of about `BLOCK_BYTES`.

The cuts follow from the offset a stream is read from, so a resumed run sees the same blocks.
"""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from tools.preprocess.input.documents import Problem, ProblemKind
from tools.preprocess.input.files import BLOCK_BYTES, Block, Blocks, Format, Slice

_ARCHIVE_READ_BYTES = 1 << 18
"""Read from an archive at a time: what precedes damage is lost only up to this much."""
_LONGEST_ESCAPE = 6
"""Bytes of JSON for one byte of text, at most: `\\u0041`."""
_ARCHIVE_ERRORS = (EOFError, OSError, zlib.error)


def line_blocks(slice_: Slice, offset: int, limit: int | None) -> Blocks:
    """Blocks of a slice.

    Args:
        slice_: Of JSON lines.
        offset: Byte (of the uncompressed text) to start at; a line starts there.
        limit: Largest document in bytes; of a line that must hold a larger one, only the end is
            looked for.
    """
    longest = None if limit is None else _LONGEST_ESCAPE * limit + BLOCK_BYTES
    with Path(slice_.name).open("rb") as stored:
        archive = None if slice_.format is Format.LINES else _Archive(stored, slice_.format)
        text = _at(offset, stored, archive)
        first = 0 if archive else slice_.start
        rest = b""
        while True:
            room = BLOCK_BYTES if slice_.stop is None else min(BLOCK_BYTES, slice_.stop - offset)
            data = rest + text.read(room - len(rest))
            if not data:
                break
            if cut := data.rfind(b"\n") + 1:
                offset, rest = offset + cut, data[cut:]
                yield Block(offset, cut, stored.tell() - first, data=data[:cut])
                continue
            line, size, is_whole = _long_line(text, data, longest)
            if not is_whole and archive and archive.damage:
                break
            offset, rest = offset + size, b""
            problem = None if line else Problem(ProblemKind.TOO_LARGE, 0, f"{size} bytes")
            yield Block(offset, len(line), stored.tell() - first, data=line, problem=problem)
        if archive and archive.damage:
            problem = Problem(ProblemKind.BROKEN_ARCHIVE, 0, archive.damage)
            yield Block(offset, 0, stored.tell(), problem=problem)


def lines_before(slice_: Slice, offset: int) -> int:
    """Number of lines of the whole input before `offset`; reads all of them."""
    start = Slice(slice_.name, slice_.format, 0, offset, 0)
    return sum(_count_lines(block.data) for block in line_blocks(start, 0, None))


def next_line_start(path: Path, offset: int) -> int:
    """Where the first line starts that starts at `offset` or after it."""
    with path.open("rb") as stream:
        if offset > 0:
            stream.seek(offset - 1)
            while (piece := stream.readline(BLOCK_BYTES)) and not piece.endswith(b"\n"):
                pass
        return stream.tell()


def _count_lines(data: bytes | bytearray) -> int:
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


class _Archive(io.RawIOBase):
    """The text of an archive. Damage ends it and is kept for later: what came before it counts."""

    def __init__(self, stored: BinaryIO, format_: Format) -> None:
        self.damage: str | None = None
        self._read: Any
        if format_ is Format.GZIP:
            self._read = gzip.GzipFile(fileobj=stored).read1
        else:
            import pyarrow  # a fifth of a second that plain files need not pay

            # Unlike zstandard's reader it notices a frame that is cut short.
            self._read = pyarrow.CompressedInputStream(stored, "zstd").read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.damage:
            return 0
        try:
            piece = self._read(min(len(buffer), _ARCHIVE_READ_BYTES))
        except _ARCHIVE_ERRORS as error:
            self.damage = str(error)
            return 0
        buffer[: len(piece)] = piece
        return len(piece)


def _at(offset: int, stored: BinaryIO, archive: _Archive | None) -> BinaryIO:
    """The text from `offset` on; an archive can only be read up to there."""
    if archive is None:
        stored.seek(offset)
        return stored
    text = io.BufferedReader(archive, _ARCHIVE_READ_BYTES)
    while offset > 0 and (piece := text.read(min(offset, BLOCK_BYTES))):
        offset -= len(piece)
    return text


def _long_line(text: BinaryIO, head: bytes, limit: int | None) -> tuple[bytearray, int, bool]:
    """Read on to the end of a line: it (nothing if over the limit), its size, whether it has an end."""
    line, size, piece = bytearray(head), len(head), b""
    while not piece.endswith(b"\n") and (piece := text.readline(BLOCK_BYTES)):
        size += len(piece)
        if limit is None or size <= limit:
            line += piece
        else:
            line.clear()  # its size is still counted, but nothing is held
    return line, size, piece.endswith(b"\n")
