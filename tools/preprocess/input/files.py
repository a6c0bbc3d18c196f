"""Inputs: which files `--input` means, what they are, and the slices that a run reads."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tools.preprocess.dataset.manifest import InputIdentity
from tools.preprocess.errors import InputError
from tools.preprocess.input.documents import Problem

BLOCK_BYTES = 4 << 20
"""Text parsed and encoded at a time; a longer line makes a longer block."""
_EDGE_BYTES = 1 << 20
_SUFFIXES = (".jsonl", ".json", ".gz", ".zst", ".zstd", ".parquet")


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
    """Of the stretch as stored, for the progress bar; 0 if not known."""


@dataclass(frozen=True)
class Position:
    """A place in the input: byte (of the uncompressed text) or row `offset` of a slice."""

    slice_index: int
    offset: int


@dataclass(frozen=True)
class Block:
    """Some whole lines, or some rows, of a slice; or one thing wrong with the input itself."""

    next_offset: int
    """Where the block after this one starts: where a resumed run starts."""
    size_bytes: int
    """Text in it."""
    read_bytes: int
    """How far the slice, or from `Source` the input, is read as stored, for the progress bar."""
    slice_index: int = 0
    """Set by `Source`."""
    data: bytes | bytearray = b""
    columns: tuple[Any, ...] | None = None
    """Of tables: one Arrow array a key."""
    problem: Problem | None = None

    @property
    def end(self) -> Position:
        """Where the next block starts."""
        return Position(self.slice_index, self.next_offset)


Blocks = Iterator[Block]


def expand(patterns: Iterable[str]) -> tuple[Path, ...]:
    """Files of `--input`: files, folders (searched for known suffixes) and globs, in sorted order.

    Raises:
        InputError: A pattern matches nothing, or names a pipe.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if pattern == "-" or (path.exists() and not path.is_dir() and not path.is_file()):
            raise InputError(
                f"--input {pattern} is a pipe or a device: it cannot be read again, which resuming "
                "after a kill needs; write it into a file first (COMMAND > text.jsonl) and give "
                "that. Archives (.gz, .zst) are read as they are."
            )
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
    """Identity of a file: size, time stamp and a hash over its edges.

    Raises:
        InputError: It cannot be read.
    """
    digest = hashlib.sha256()
    try:
        status = path.stat()
        with path.open("rb") as stream:
            digest.update(stream.read(_EDGE_BYTES))
            stream.seek(max(0, status.st_size - _EDGE_BYTES))
            digest.update(stream.read(_EDGE_BYTES))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check it.") from None
    return InputIdentity(path.name, status.st_size, status.st_mtime_ns, digest.hexdigest())


def whole_file(path: Path) -> Slice:
    """All of one file.

    Raises:
        InputError: Its suffix promises an archive, and the content is none.
    """
    return Slice(str(path), _detect(path), 0, None, path.stat().st_size)


def check_keys(keys: Sequence[str]) -> None:
    """Refuse keys that cannot be part of a file name.

    Raises:
        InputError: A key is empty, repeated or holds a slash.
    """
    for key in keys:
        if not key or "/" in key or "\0" in key or keys.count(key) > 1:
            raise InputError(
                f"--json-keys '{key}' cannot name a data set: keys become part of the file's "
                "name, so each must be given once, without slashes."
            )


def _detect(path: Path) -> Format:
    """Format by the first bytes: names lie."""
    with path.open("rb") as stream:
        head = stream.read(4)
    for magic, found in _MAGIC.items():
        if head.startswith(magic):
            return found
    promised = _BY_SUFFIX.get(path.suffix)
    if promised is not None and head:
        raise InputError(
            f"{path} is no {promised} file, whatever its name says; fetch it again or rename it."
        )
    return Format.LINES


_MAGIC = {b"\x1f\x8b": Format.GZIP, b"\x28\xb5\x2f\xfd": Format.ZSTD, b"PAR1": Format.PARQUET}
_BY_SUFFIX = {
    ".gz": Format.GZIP,
    ".zst": Format.ZSTD,
    ".zstd": Format.ZSTD,
    ".parquet": Format.PARQUET,
}
