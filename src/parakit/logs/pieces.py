"""Read the bytes of a log in pieces of complete lines, unpacked and with folded lines joined.

At most one chunk and one line are in memory. The beginning of a log shows the format of its iterations, and whether a
terminal or `fold` has cut its lines. Cut lines are joined if that gives more numbers.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import IO, Any

from parakit.config.files import open_regular_file
from parakit.logs.dialects import LineFormat, find_iterations, load_line_formats

FIRST_CHUNK_BYTES = 1 << 16
CHUNK_BYTES = 1 << 22
MAX_LINE = 1 << 16
"""Most characters of a line. A longer line comes in pieces."""

_MAX_LONG_LINE = 1 << 25
"""Bytes of one line that are read. The rest of a longer line, up to a line end or a carriage return, is dropped."""
_PACKED_BYTES = 1 << 10
"""Bytes that are unpacked at once. Damage loses what so many bytes hold."""
_MAX_WINDOW = 1 << 27
_WIDEST, _NARROWEST = 250, 60
_SAMPLE_BYTES = 1 << 21
_MIN_FULL = 3
"""Lines that end at the width, or in a blank, from which on a log may have been cut there."""
_MIN_GAIN = 1.3
"""Ratio of the numbers in joined lines to those in the lines as they are, above which lines are joined."""
_WEIGHT = 4
"""Additional weight of an iteration's time and of its loss when numbers are counted."""


@dataclass(frozen=True)
class LogPiece:
    """Consecutive lines of a log as bytes, with the numbers of the lines in the file."""

    data: bytes
    numbers: Sequence[int]
    """Number of each line, from 1, as an editor counts them."""
    whole: bool = True
    """True if the bytes are complete lines with their newlines, False if they are a part of one line."""


class Cut(Enum):
    """Kinds of places at which a program cuts long lines into several lines."""

    ANYWHERE = auto()
    """Cut at the width (`fold`, a terminal)."""
    BEHIND_BLANKS = auto()
    """Cut after the last blank that fits (`fold -s`)."""
    AT_BLANKS = auto()
    """Cut at blanks, which are lost (a mail, an editor that fills paragraphs)."""


@dataclass(frozen=True)
class Fold:
    """Width at which a program has cut a log's long lines, and the kind of places where it has cut them."""

    width: int
    cut: Cut

    def joint(self, line: bytes, following: bytes) -> bytes | None:
        """Return the text to put between two lines that were one line: a blank if the cut has lost one, else nothing.

        None means that `following` does not continue `line`.
        """
        # Without a blank before the width, every program cuts at the width.
        if self.cut is Cut.ANYWHERE or b" " not in line:
            return b"" if len(line) == self.width else None
        # The line was cut only if the next word did not fit, with a blank before or after it.
        word = following.split(b" ", 1)[0]
        if self.cut is Cut.BEHIND_BLANKS:
            has_blank_after_word = len(word) < len(following)
            needed_width = len(line) + len(word) + has_blank_after_word
            is_cut = line.endswith(b" ") and needed_width > self.width
            return b"" if is_cut else None
        if not word:
            return None
        if len(line) + 1 + len(word) > self.width:
            return b" "
        # Numbers after these texts are padded with blanks. The cut has lost all of them, so the line may be short.
        texts_before_padding = (b":", b"/", *(format_.mark for format_ in load_line_formats()))
        return b" " if line.endswith(texts_before_padding) else None


CUT_OFF = (
    "the packed file is cut off or lacks blocks: only the lines that can be unpacked were read"
)
"""Note on a packed file of which everything that was unpacked is right."""
DAMAGED = (
    "the packed file is damaged: only the lines that can be unpacked were read, and figures after the"
    " damage may be wrong"
)
"""Note on a packed file with wrong bytes.

The checksum of a packed stream stands at its end, so it does not show where the damage begins. The bytes that are
unpacked after the damage can look like lines with other digits."""


def open_log(
    path: Path, on_damage: Callable[[str], None] = lambda _: None
) -> tuple[tuple[LineFormat, ...], Iterator[LogPiece]]:
    """Return the possible formats of a log's iteration lines, and an iterator over its complete lines.

    There is a single format if the beginning of the log shows an iteration. Otherwise all known formats are
    returned. The iterator starts at the beginning of the file and yields blocks of unpacked lines. It joins lines
    that a terminal or `fold` has cut. It calls `on_damage` with CUT_OFF or DAMAGED if the file is packed and cannot
    be unpacked to its end.

    Raises:
        OSError: The file cannot be opened or read.
    """
    sample = _read_until_iteration(path)
    fold, joined_sample = _unfold_sample(sample)
    pieces = _number_lines(read_chunks(path, on_damage))
    if fold is not None:
        pieces = _unfold(pieces, fold)
    return _find_formats(joined_sample.decode("utf-8", "replace")), pieces


def _read_until_iteration(path: Path) -> bytes:
    """Return the beginning of a log, up to the first iteration line in Megatron's format.

    Reading also stops after _SAMPLE_BYTES, and at the end of the log. The log is read in chunks, so the result
    may be longer than needed.

    Raises:
        OSError: The file cannot be opened or read.
    """
    sample, formats = b"", load_line_formats()
    for chunk in read_chunks(path):
        sample += chunk
        # The line of the first iteration may be cut within the text that shows its format.
        joined = sample.replace(b"\n", b"").decode("utf-8", "replace")
        # The first format is Megatron's, which nearly all logs have. A log of another format is read up to
        # _SAMPLE_BYTES.
        shows_megatron = formats[0].opening.search(joined) is not None
        if shows_megatron or len(sample) >= _SAMPLE_BYTES:
            break
    return sample


def _find_formats(text: str) -> tuple[LineFormat, ...]:
    """Return the format of a log's iteration lines, as a tuple of one.

    If lines of several formats are in the text, the first of these formats is returned. If the text has no
    iteration line, all formats are returned.
    """
    formats = load_line_formats()
    for line_format in formats:
        # The word is looked for first, because most patterns are slow to find nothing: 20 ms per megabyte and format.
        if line_format.word not in text or not line_format.opening.search(text):
            continue
        lines = (line for line in text.splitlines() if line_format.word in line)
        if any(line_format.find(line[:MAX_LINE]) for line in lines):
            return (line_format,)
    return formats


def _unfold_sample(sample: bytes) -> tuple[Fold | None, bytes]:
    """Return how the lines of a log's beginning were cut, and this beginning with the lines joined.

    The lines are joined once for each kind of cut that they may have. The kind whose joined lines contain the most
    iteration times, losses and other values is chosen. None means that no kind gives clearly more values than the
    lines as they are. The beginning is then returned unchanged.
    """
    lines = sample.split(b"\n")[:-1]
    width = max(map(len, lines), default=0)
    if not _NARROWEST <= width <= _WIDEST:
        return None, sample
    # If two kinds give equally many values, the first one is taken, because it loses no blank.
    folds = []
    if sum(len(line) == width for line in lines) >= _MIN_FULL:
        folds.append(Fold(width, Cut.ANYWHERE))
    if sum(line.endswith(b" ") for line in lines) >= _MIN_FULL:
        folds.append(Fold(width, Cut.BEHIND_BLANKS))
    folds.append(Fold(width, Cut.AT_BLANKS))
    joined_samples = []
    for fold in folds:
        pieces = _unfold(_number_lines([sample]), fold)
        joined_samples.append(b"".join(piece.data for piece in pieces))
    counts = list(map(_count_numbers, joined_samples))
    best = counts.index(max(counts))
    if counts[best] > _MIN_GAIN * _count_numbers(sample):
        return folds[best], joined_samples[best]
    return None, sample


def read_chunks(path: Path, on_damage: Callable[[str], None] = lambda _: None) -> Iterator[bytes]:
    """Yield the bytes of a log, unpacked. The first chunks are small, so that the format is known early.

    If a packed file is cut off or damaged, `on_damage` is called with CUT_OFF or DAMAGED, and the bytes end where
    unpacking fails.

    Raises:
        OSError: The file cannot be opened or read.
    """
    with open_regular_file(path) as raw:
        magic = raw.read(8)
        raw.seek(0)
        unpack = next(
            (unpack for start, unpack in _UNPACKERS.items() if magic.startswith(start)), None
        )
        if unpack is None:
            size = FIRST_CHUNK_BYTES
            while chunk := raw.read(size):
                yield chunk
                size = min(2 * size, CHUNK_BYTES)
            return
        chunk, size = b"", FIRST_CHUNK_BYTES
        try:
            for unpacked in unpack(raw):
                chunk += unpacked
                if len(chunk) >= size:
                    yield chunk
                    chunk, size = b"", min(2 * size, CHUNK_BYTES)
        except EOFError:
            on_damage(CUT_OFF)
        except (OSError, zlib.error, lzma.LZMAError):
            on_damage(DAMAGED)
        if chunk:
            yield chunk


def _unpack_streams(raw: IO[bytes], start: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file, which may consist of several packed streams.

    Args:
        raw: The packed file.
        start: Function that returns an object to unpack one stream, such as `bz2.BZ2Decompressor`.

    Raises:
        EOFError: The last stream has no end.
        OSError: The bytes are damaged; `zlib.error` and `lzma.LZMAError` mean the same.
    """
    stream = None
    while packed := raw.read(_PACKED_BYTES):
        while packed:
            stream = stream or start()
            yield stream.decompress(packed)
            packed = b""
            if stream.eof:
                # Zeros between and after streams are padding.
                packed, stream = stream.unused_data.lstrip(b"\0"), None
    if stream is not None:
        raise EOFError("The packed file has no end.")


def _number_lines(chunks: Iterable[bytes]) -> Iterator[LogPiece]:
    """Yield the bytes of a log as pieces of complete lines, with the numbers of the lines.

    What follows the last newline is a piece with `whole` False, which may be empty. A line that is longer than MAX_LINE
    comes in parts, each a piece with `whole` False. Parts beyond _MAX_LONG_LINE bytes since the line's last carriage
    return are dropped, so that a line of gigabytes takes no memory.
    """
    number = 1
    unfinished = b""  # The begin of a line, whose end is in a later chunk.
    is_inside_long_line = False
    long_line_bytes = 0
    for chunk in chunks:
        data = unfinished + chunk
        if is_inside_long_line:
            first_newline = data.find(b"\n")
            end = len(data) if first_newline < 0 else first_newline + 1
            part, data = data[:end], data[end:]
            long_line_bytes = _count_bytes_since_return(part, long_line_bytes)
            is_inside_long_line = not part.endswith(b"\n")
            if long_line_bytes <= _MAX_LONG_LINE:
                yield LogPiece(part, (number,), whole=False)
            elif not is_inside_long_line:
                # The text is dropped, but the line ends here.
                yield LogPiece(b"\n", (number,), whole=False)
            if not is_inside_long_line:
                number += 1
        end = data.rfind(b"\n") + 1
        if end:
            numbers = range(number, number + data.count(b"\n"))
            yield LogPiece(data[:end], numbers)
            number = numbers.stop
        unfinished = data[end:]
        if len(unfinished) > MAX_LINE:
            yield LogPiece(unfinished, (number,), whole=False)
            long_line_bytes = len(unfinished)
            unfinished, is_inside_long_line = b"", True
    yield LogPiece(unfinished, (number,), whole=False)


def _count_bytes_since_return(part: bytes, bytes_before: int) -> int:
    """Return the bytes of a long line up to the end of a part, counted from the last carriage return in the line.

    A carriage return begins a new line on the screen, as a progress bar does. One that is a part of the newline
    (`\\r\\n`) does not count.

    Args:
        part: The part, which may end with the newline.
        bytes_before: The bytes before the part, counted in the same way.
    """
    text = part.removesuffix(b"\r\n")
    position = text.rfind(b"\r")
    if position < 0:
        return bytes_before + len(part)
    return len(part) - position


def _unfold(pieces: Iterable[LogPiece], fold: Fold) -> Iterator[LogPiece]:
    """Yield pieces in which lines that were cut are joined. A joined line has the number of its first part.

    A line is not joined further once it is longer than MAX_LINE.
    """
    joined_line, number = b"", 0
    last: bytes | None = None
    for piece in pieces:
        lines: list[bytes] = []
        numbers: list[int] = []
        for line, line_number in zip(piece.data.split(b"\n"), piece.numbers, strict=False):
            joint = fold.joint(last, line) if last is not None else None
            if joint is None or len(joined_line) > MAX_LINE:
                if last is not None:
                    lines.append(joined_line)
                    numbers.append(number)
                joined_line, number = line, line_number
            else:
                joined_line += joint + line
            last = line
        if lines:
            yield LogPiece(b"\n".join([*lines, b""]), numbers)
    yield LogPiece(joined_line, (number,), whole=False)


def _count_numbers(text: bytes) -> int:
    """Return how many numbers can be read from the iteration lines of a text.

    The time and the loss of an iteration count 1 + _WEIGHT times each.
    """
    count = 0
    for line in text.decode("utf-8", "replace").splitlines():
        for iteration in find_iterations(line):
            values = [getattr(iteration, name) for name in iteration.__struct_fields__]
            count += sum(value is not None and value is not False for value in values)
            count += _WEIGHT * (iteration.elapsed_ms is not None)
            count += _WEIGHT * (iteration.lm_loss is not None)
    return count


def _unpack_bzip2(raw: IO[bytes]) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file that is packed with bzip2. Each block is checked before it is yielded.

    Raises:
        EOFError: The file is cut off or damaged.
    """
    try:
        yield from _unpack_streams(raw, bz2.BZ2Decompressor)
    except OSError as error:
        raise EOFError("A block of the packed file is damaged.") from error


def _unpack_zstd(raw: IO[bytes]) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file that is packed with zstd.

    Raises:
        EOFError: The last frame has no end.
        OSError: The file is damaged.
    """
    # Few logs are packed with zstd, so the import is not made at the top.
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    try:
        yield from _unpack_streams(raw, decompressor.decompressobj)
    except zstandard.ZstdError as error:
        raise OSError("The packed file is damaged.") from error


_GZIP = 16 + zlib.MAX_WBITS
"""Format of zlib's streams that is gzip's."""
_UNPACKERS: dict[bytes, Callable[[IO[bytes]], Iterator[bytes]]] = {
    b"\x1f\x8b": lambda raw: _unpack_streams(raw, lambda: zlib.decompressobj(_GZIP)),
    b"BZh": _unpack_bzip2,
    b"\xfd7zXZ\0": lambda raw: _unpack_streams(raw, lzma.LZMADecompressor),
    b"\x28\xb5\x2f\xfd": _unpack_zstd,
}
"""Functions that yield what a packed file holds, by the file's first bytes."""
