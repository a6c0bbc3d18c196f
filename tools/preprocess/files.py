"""Inputs: which files `--input` means, what they are, and the slices and blocks that a run reads."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tools.dataset.indexed import DatasetError, InputIdentity

BLOCK_BYTES = 4 << 20
"""Text parsed and encoded at a time; a longer line makes a longer block."""
_EDGE_BYTES = 1 << 20


class Format(StrEnum):
    """How an input holds its documents."""

    LINES = "JSON lines"
    GZIP = "gzip"
    ZSTD = "zstd"
    PARQUET = "parquet"
    HUB = "hub"


_MAGIC = {b"\x1f\x8b": Format.GZIP, b"\x28\xb5\x2f\xfd": Format.ZSTD, b"PAR1": Format.PARQUET}
_SUFFIXES = {
    ".jsonl": Format.LINES,
    ".json": Format.LINES,
    ".gz": Format.GZIP,
    ".zst": Format.ZSTD,
    ".zstd": Format.ZSTD,
    ".parquet": Format.PARQUET,
}


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


@dataclass(frozen=True)
class Position:
    """A place between two blocks: byte (of the uncompressed text) or row `offset` of a slice."""

    slice_index: int
    offset: int
    lines: int
    """Lines (or rows) of the slice before it."""


def expand(patterns: Iterable[str]) -> tuple[Path, ...]:
    """Files of `--input`: files, folders (searched for known suffixes) and globs, in sorted order."""
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if pattern == "-" or (path.exists() and not path.is_dir() and not path.is_file()):
            raise DatasetError(
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
            raise DatasetError(f"--input {pattern} matches {what}; check the path.")
        files += found
    return tuple(files)


def identify(path: Path) -> InputIdentity:
    """Identity of a file: size, time stamp and a hash over its edges."""
    try:
        status = path.stat()
        with path.open("rb") as stream:
            digest = hashlib.sha256(stream.read(_EDGE_BYTES))
            stream.seek(max(0, status.st_size - _EDGE_BYTES))
            digest.update(stream.read(_EDGE_BYTES))
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror}); check it.") from None
    return InputIdentity(path.name, status.st_size, status.st_mtime_ns, digest.hexdigest())


def whole_file(path: Path) -> Slice:
    """All of one file, its format by the first bytes: names lie."""
    with path.open("rb") as stream:
        head = stream.read(4)
    found = next((known for magic, known in _MAGIC.items() if head.startswith(magic)), Format.LINES)
    promised = _SUFFIXES.get(path.suffix, Format.LINES)
    if head and found is Format.LINES is not promised:
        raise DatasetError(
            f"{path} is no {promised} file, whatever its name says; fetch it again or rename it."
        )
    return Slice(str(path), found, 0, None, path.stat().st_size)
