"""Inputs as slices: stretches of files that are read from anywhere on, block by block."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from tools.preprocess.errors import InputError
from tools.preprocess.manifest import InputIdentity

BLOCK_BYTES = 4 << 20
"""Text parsed and encoded at a time; a longer line makes a longer block."""
_EDGE_BYTES = 1 << 20
_SUFFIXES = (".jsonl", ".json", ".gz", ".zst", ".zstd", ".parquet")


class Format(StrEnum):
    """How a file holds its documents, told by its first bytes."""

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
    """Of the stretch as stored, for the progress bar; 0 if not known."""


@dataclass(frozen=True)
class Block:
    """Some whole lines, or some rows, of a slice."""

    next_offset: int
    """Where the block after this one starts: what a resumed run goes on from."""
    data: bytes | bytearray | None = None
    columns: tuple[Sequence[Any], ...] | None = None
    size_bytes: int = 0
    """Text in it."""
    refused_bytes: int = 0
    """Size of the one line it stands for, which was over the limit and is left out."""
    truncated: bool = False
    """The archive ends before its own end mark; nothing follows."""


def expand(patterns: Sequence[str]) -> tuple[Path, ...]:
    """Files of `--input`: files, folders (searched for known suffixes) and globs, in sorted order.

    Raises:
        InputError: A pattern matches nothing.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
        elif path.exists():
            found = [path]
        else:
            found = sorted(Path(p) for p in glob.glob(pattern, recursive=True))  # noqa: PTH207
        if not found:
            what = f"no file ending in {', '.join(_SUFFIXES)}" if path.is_dir() else "nothing"
            raise InputError(f"--input {pattern} matches {what}; check the path.")
        files += found
    return tuple(files)


def identify(path: Path) -> InputIdentity:
    """Identity of a file: size, time stamp and a hash over its edges."""
    status = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        digest.update(stream.read(_EDGE_BYTES))
        stream.seek(max(0, status.st_size - _EDGE_BYTES))
        digest.update(stream.read(_EDGE_BYTES))
    return InputIdentity(path.name, status.st_size, status.st_mtime_ns, digest.hexdigest())


def detect(path: Path) -> Format:
    """Format of a file by its first bytes.

    Raises:
        InputError: The suffix promises an archive, the content is none; or the file is unreadable.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(4)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check it.") from None
    for magic, found in _MAGIC.items():
        if head.startswith(magic):
            return found
    promised = _BY_SUFFIX.get(path.suffix)
    if promised is not None and head:
        raise InputError(f"{path} is no {promised} file, whatever its name says; fetch it again.")
    return Format.LINES


def whole_file(path: Path) -> Slice:
    """All of one file."""
    return Slice(str(path), detect(path), 0, None, path.stat().st_size)


_MAGIC = {b"\x1f\x8b": Format.GZIP, b"\x28\xb5\x2f\xfd": Format.ZSTD, b"PAR1": Format.PARQUET}
_BY_SUFFIX = {
    ".gz": Format.GZIP,
    ".zst": Format.ZSTD,
    ".zstd": Format.ZSTD,
    ".parquet": Format.PARQUET,
}

Blocks = Iterator[Block]
Opener = Callable[[], BinaryIO]


def plain_blocks(slice_: Slice, offset: int, limit: int | None) -> Blocks:
    """Blocks of an uncompressed file, from byte `offset` on."""
    with Path(slice_.name).open("rb", buffering=0) as stream:
        stream.seek(offset)
        yield from split_lines(stream.read, offset, slice_.stop, limit)


def split_lines(
    read: Callable[[int], bytes], offset: int, stop: int | None, limit: int | None
) -> Blocks:
    """Cut a stream into blocks of whole lines of about `BLOCK_BYTES`.

    The cuts follow from `offset` alone, so a resumed run sees the same blocks.

    Args:
        read: Reads at most that many bytes; empty at the end.
        offset: Where the stream stands.
        stop: Where to end, if before the stream's end; a line ends there.
        limit: Longest line in bytes; longer ones are skipped over and reported.
    """
    rest = b""
    while True:
        wanted = BLOCK_BYTES - len(rest)
        if stop is not None:
            wanted = min(wanted, stop - offset - len(rest))
        chunk = _read_fully(read, wanted)
        data = rest + chunk
        if not data:
            return
        last = len(chunk) < wanted or (stop is not None and offset + len(data) >= stop)
        cut = len(data) if last else data.rfind(b"\n") + 1
        if cut == 0:
            block, rest = _long_line(read, data, offset, limit)
            rest = rest if stop is None else rest[: stop - block.next_offset]
        else:
            block, rest = Block(offset + cut, data[:cut], size_bytes=cut), data[cut:]
        yield block
        offset = block.next_offset
        if last:
            return


def _long_line(
    read: Callable[[int], bytes], head: bytes, offset: int, limit: int | None
) -> tuple[Block, bytes]:
    """Read on to the end of a line longer than a block; the line, and what was read beyond it."""
    line, size = bytearray(head), len(head)
    while True:
        chunk = _read_fully(read, BLOCK_BYTES)
        cut = chunk.find(b"\n") + 1
        end = cut or len(chunk)
        size += end
        if limit is not None and size > limit:
            line.clear()  # keep counting, hold nothing
        else:
            line += chunk[:end]
        if cut or len(chunk) < BLOCK_BYTES:
            break
    refused = 0 if line else size
    return Block(offset + size, line, size_bytes=size, refused_bytes=refused), chunk[end:]


def _read_fully(read: Callable[[int], bytes], size: int) -> bytes:
    """As many bytes as asked for, fewer only at the end of the stream."""
    data = read(size)
    if len(data) == size or not data:
        return data
    pieces, have = [data], len(data)
    while have < size and (data := read(size - have)):
        pieces.append(data)
        have += len(data)
    return b"".join(pieces)
