"""JSON lines, plain or compressed, as blocks of whole lines of about `BLOCK_BYTES`.

The cuts follow from the offset a stream is read from, so a resumed run sees the same blocks.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
    stride = BLOCK_BYTES if slice_.format is Format.LINES else _ARCHIVE_READ_BYTES
    longest = None if limit is None else _LONGEST_ESCAPE * limit + BLOCK_BYTES
    with _open(slice_, offset) as (read, position):
        reader = _ArchiveReader(read, position, stride)
        if slice_.format is not Format.LINES:
            reader.skip(offset)
        yield from _split(reader, offset, slice_.stop, longest)


def lines_before(slice_: Slice, offset: int) -> int:
    """Number of lines of the whole input before `offset`; reads all of them."""
    start = Slice(slice_.name, slice_.format, 0, offset, 0)
    return sum(_count_lines(block.data) for block in line_blocks(start, 0, None))


def next_line_start(path: Path, offset: int) -> int:
    """Where the first line starts that starts at `offset` or after it."""
    if offset == 0:
        return 0
    with path.open("rb") as stream:
        stream.seek(offset - 1)
        while piece := stream.read(BLOCK_BYTES):
            if cut := piece.find(b"\n") + 1:
                return stream.tell() - len(piece) + cut
        return stream.tell()


def _count_lines(data: bytes | bytearray) -> int:
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


@contextmanager
def _open(slice_: Slice, offset: int) -> Iterator[tuple[Callable[[int], bytes], Callable[[], int]]]:
    """A function that reads some bytes of text, and one that tells how far the file is read.

    Plain files stand at `offset`, archives at their start.
    """
    path = Path(slice_.name)
    if slice_.format is Format.LINES:
        with path.open("rb", buffering=0) as plain:
            plain.seek(offset)
            yield lambda size: plain.read(size) or b"", lambda: plain.tell() - slice_.start
        return
    with path.open("rb") as stored:
        if slice_.format is Format.GZIP:
            with gzip.GzipFile(fileobj=stored) as archive:
                yield archive.read1, stored.tell
        else:
            import pyarrow  # a fifth of a second that plain files need not pay

            # Unlike zstandard's reader it notices a frame that is cut short.
            with pyarrow.CompressedInputStream(stored, "zstd") as archive:
                yield archive.read, stored.tell


class _ArchiveReader:
    """Reads fully, and keeps damage of an archive for later: what came before it counts."""

    def __init__(
        self, read: Callable[[int], bytes], position: Callable[[], int], stride: int
    ) -> None:
        self._read = read
        self._stride = stride
        self.position = position
        self.damage: str | None = None

    def skip(self, size: int) -> None:
        """Pass over text."""
        while size > 0 and (piece := self.read(min(size, BLOCK_BYTES))):
            size -= len(piece)

    def read(self, size: int) -> bytes:
        """As many bytes as asked for; fewer only at the end, or where the archive is damaged."""
        found: list[bytes] = []
        while size > 0:
            try:
                piece = self._read(min(size, self._stride))
            except _ARCHIVE_ERRORS as error:
                self.damage = str(error)
                break
            if not piece:
                break
            found.append(piece)
            size -= len(piece)
        return found[0] if len(found) == 1 else b"".join(found)


def _split(reader: _ArchiveReader, offset: int, stop: int | None, limit: int | None) -> Blocks:
    rest = b""
    while True:
        wanted = BLOCK_BYTES - len(rest)
        if stop is not None:
            wanted = min(wanted, stop - offset - len(rest))
        chunk = reader.read(wanted)
        data = rest + chunk
        last = len(chunk) < wanted or (stop is not None and offset + len(data) >= stop)
        if last and reader.damage:
            data = data[: data.rfind(b"\n") + 1]  # the line that was cut is no document
        cut = len(data) if last else data.rfind(b"\n") + 1
        if cut == 0 and not last:
            block, rest = _long_line(reader, data, offset, limit)
            rest = rest if stop is None else rest[: stop - block.next_offset]
        else:
            block, rest = Block(offset + cut, cut, reader.position(), data[:cut]), data[cut:]
        if block.size_bytes or block.problem:
            yield block
            offset = block.next_offset
        if last or reader.damage:
            break
    if reader.damage:
        problem = Problem(ProblemKind.BROKEN_ARCHIVE, 0, reader.damage)
        yield Block(offset, 0, reader.position(), problem=problem)


def _long_line(
    reader: _ArchiveReader, head: bytes, offset: int, limit: int | None
) -> tuple[Block, bytes]:
    """Read on to the end of a line longer than a block; the line, and what was read beyond it."""
    line, size, refused = bytearray(head), len(head), False
    while True:
        chunk = reader.read(BLOCK_BYTES)
        cut = chunk.find(b"\n") + 1
        end = cut or len(chunk)
        size += end
        refused = limit is not None and size > limit
        if refused:
            line.clear()  # its size is still counted, but nothing is held
        else:
            line += chunk[:end]
        if cut or len(chunk) < BLOCK_BYTES:
            break
    if reader.damage and not cut:
        return Block(offset, 0, reader.position()), b""
    if refused:
        problem = Problem(ProblemKind.TOO_LARGE, 0, f"{size} bytes")
        return Block(offset + size, 0, reader.position(), problem=problem), chunk[end:]
    return Block(offset + size, size, reader.position(), line), chunk[end:]
