"""A log's bytes as whole lines, each with its number: unpacked, and joined where they were cut.

Bounded memory: at most one chunk and one line are held. What a log is like shows in its beginning: who
reads its iterations, and whether a terminal or `fold` has cut its lines, which is found by what joining
them restores.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import IO

from parakit.config.files import open_regular_file
from parakit.logs.dialects import LineFormat, find_iterations, load_line_formats

FIRST_CHUNK_BYTES = 1 << 16
CHUNK_BYTES = 1 << 22
MAX_LINE = 1 << 16
"""Characters; a longer line comes in pieces."""

_MAX_WINDOW = 1 << 27
_WIDEST, _NARROWEST = 250, 60
_SAMPLE_BYTES = 1 << 21
_MIN_FULL = 3
_GAIN = 1.3
"""So many times more numbers must the joined lines give."""
_WEIGHT = 4


@dataclass(frozen=True)
class LogPiece:
    """Bytes of a log and where they stand in it."""

    data: bytes
    numbers: Sequence[int]
    """Of each of its lines, from 1 on, as an editor counts them."""
    whole: bool = True
    """Whether these are whole lines, each with its newline; else a part of a single one."""


class Cut(Enum):
    """Where lines are cut."""

    ANYWHERE = auto()
    """At the width (`fold`, a terminal)."""
    BEHIND_BLANKS = auto()
    """Behind the last blank that fits (`fold -s`)."""
    AT_BLANKS = auto()
    """There, and the blanks are gone (a mail, an editor that fills paragraphs)."""


@dataclass(frozen=True)
class Fold:
    """How a log's lines are cut."""

    width: int
    cut: Cut

    def joint(self, line: bytes, following: bytes) -> bytes | None:
        """What joins a line to the one behind it; None where it had ended."""
        if self.cut is Cut.ANYWHERE or b" " not in line:
            return b"" if len(line) == self.width else None
        if self.cut is Cut.BEHIND_BLANKS and not line.endswith(b" "):
            return None
        if self.cut is Cut.AT_BLANKS and following[:1] in (b" ", b""):
            return None
        # It was cut only if the next word did not fit, with a blank before or behind it.
        word = following.split(b" ", 1)[0]
        blank = b" " if self.cut is Cut.AT_BLANKS else b""
        needed = len(line) + len(word) + (bool(blank) or len(word) < len(following))
        # How many blanks are gone is not known; behind these a number that is padded follows.
        before = (b":", b"/", *(each.mark for each in load_line_formats()))
        padded = bool(blank) and line.endswith(before)
        return blank if needed > self.width or padded else None


def open_log(path: Path) -> tuple[tuple[LineFormat, ...], Iterator[LogPiece]]:
    """The formats that its iterations may have (one, unless its beginning shows none), and its lines.

    Raises:
        OSError: The file cannot be opened or read.
    """
    sample, formats = b"", load_line_formats()
    for chunk in read_chunks(path):
        sample += chunk
        # The first iteration's own line may be cut within the words that tell it.
        joined = sample.replace(b"\n", b"").decode("utf-8", "replace")
        if formats[0].opening.search(joined) or len(sample) >= _SAMPLE_BYTES:
            break
    fold, whole = _unfolded_sample(sample)
    text = whole.decode("utf-8", "replace")
    for each in formats:
        lines = text.splitlines() if each.opening.search(text) else ()
        if any(each.find(line[:MAX_LINE]) for line in lines if each.word in line):
            formats = (each,)
            break
    pieces = _numbered(read_chunks(path))
    return formats, _unfolded(pieces, fold) if fold else pieces


def _unfolded_sample(sample: bytes) -> tuple[Fold | None, bytes]:
    """How a log's beginning is cut, and it without these cuts; None where joining restores little."""
    lines = sample.split(b"\n")[:-1]
    width = max(map(len, lines), default=0)
    if not _NARROWEST <= width <= _WIDEST:
        return None, sample
    folds = [Fold(width, Cut.AT_BLANKS)]
    if sum(line.endswith(b" ") for line in lines) >= _MIN_FULL:
        folds.insert(0, Fold(width, Cut.BEHIND_BLANKS))
    if sum(len(line) == width for line in lines) >= _MIN_FULL:
        folds.insert(0, Fold(width, Cut.ANYWHERE))
    joined = [b"".join(p.data for p in _unfolded(_numbered([sample]), fold)) for fold in folds]
    numbers = list(map(_numbers, joined))
    best = numbers.index(max(numbers))
    if numbers[best] > _GAIN * _numbers(sample):
        return folds[best], joined[best]
    return None, sample


def read_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a log, unpacked; the first chunks are small, so that a reader learns early.

    Raises:
        OSError: The file cannot be opened or read.
    """
    with open_regular_file(path) as raw:
        magic = raw.read(8)
        raw.seek(0)
        unpack = next(
            (unpack for start, unpack in _PACKED.items() if magic.startswith(start)), None
        )
        read = unpack(raw) if unpack else raw.read
        size = FIRST_CHUNK_BYTES
        while True:
            try:
                chunk = read(size)
            except (OSError, EOFError, zlib.error, lzma.LZMAError):
                if unpack is None:
                    raise
                return  # Cut or damaged: what came before it still counts.
            if not chunk:
                return
            yield chunk
            size = min(2 * size, CHUNK_BYTES)


def _numbered(chunks: Iterable[bytes]) -> Iterator[LogPiece]:
    """The bytes of a log in whole lines; a line too long to wait for its end comes in parts."""
    rest, inside_line, number = b"", False, 1
    for chunk in chunks:
        data = rest + chunk
        if inside_line:
            end = data.find(b"\n") + 1 or len(data)
            yield LogPiece(data[:end], (number,), whole=False)
            inside_line = not data.endswith(b"\n", 0, end)
            data, number = data[end:], number + (not inside_line)
        whole = data.rfind(b"\n") + 1
        if whole:
            numbers = range(number, number + data.count(b"\n"))
            yield LogPiece(data[:whole], numbers)
            number = numbers.stop
        rest = data[whole:]
        if len(rest) > MAX_LINE:
            yield LogPiece(rest, (number,), whole=False)
            rest, inside_line = b"", True
    yield LogPiece(rest, (number,), whole=False)


def _unfolded(pieces: Iterable[LogPiece], fold: Fold) -> Iterator[LogPiece]:
    """The lines as they were before they were cut, each with the number of its first part."""
    whole, number = b"", 0
    last: bytes | None = None
    for piece in pieces:
        lines: list[bytes] = []
        numbers: list[int] = []
        for line, place in zip(piece.data.split(b"\n"), piece.numbers, strict=False):
            joint = fold.joint(last, line) if last is not None else None
            if joint is None or len(whole) > MAX_LINE:
                if last is not None:
                    lines.append(whole)
                    numbers.append(number)
                whole, number = line, place
            else:
                whole += joint + line
            last = line
        if lines:
            yield LogPiece(b"\n".join([*lines, b""]), numbers)
    yield LogPiece(whole, (number,), whole=False)


def _numbers(text: bytes) -> int:
    """How many numbers the iteration lines of a text give; a time and a loss are worth more."""
    found = 0
    for line in text.decode("utf-8", "replace").splitlines():
        for iteration in find_iterations(line):
            values = (getattr(iteration, name) for name in iteration.__struct_fields__)
            found += sum(value is not None and value is not False for value in values)
            known = (iteration.elapsed_ms is not None) + (iteration.lm_loss is not None)
            found += _WEIGHT * known
    return found


def _zstd(raw: IO[bytes]) -> Callable[[int], bytes]:
    # Imported here: few logs are packed so.
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(
        raw, read_across_frames=True
    )

    def read(size: int) -> bytes:
        try:
            return reader.read(size)
        except zstandard.ZstdError as error:
            raise EOFError from error

    return read


_PACKED: dict[bytes, Callable[[IO[bytes]], Callable[[int], bytes]]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw).read,
    b"BZh": lambda raw: bz2.BZ2File(raw).read,
    b"\xfd7zXZ\0": lambda raw: lzma.open(raw).read,  # noqa: SIM115
    b"\x28\xb5\x2f\xfd": _zstd,
}
"""What unpacks a file, by its first bytes."""
