"""A log as a stream of clean lines, whatever is in the file.

Bounded memory: at most one chunk and one piece are held. Gzip is found by its magic number, invalid
UTF-8 is replaced, ANSI escapes and whatever else a terminal would obey are dropped, a carriage return
ends a line as a newline does.
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

CHUNK_BYTES = 1 << 20
MAX_LINE = 1 << 16
"""Characters; a longer line comes in pieces, cut before an iteration's text where it has one."""

_ITERATION = " iteration "
# Those that end a line stay, and so does the escape, which is dropped with its sequence.
_CONTROLS = bytes({*range(0x20), 0x7F} - {*b"\t\n\v\f\r\x1b\x1c\x1d\x1e"})
_C1 = re.compile("[\x80-\x84\x86-\x9f]")
_GZIP_MAGIC = b"\x1f\x8b"
# Longest escape kept apart is bounded, so that a hostile "\x1b[0;0;0;…" costs one pass.
_ANSI = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])"
)


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log, plain or gzip; empty ones are left out.

    Raises:
        OSError: The file cannot be opened or read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    for chunk in _chunks(path):
        text = decoder.decode(chunk.translate(None, _CONTROLS))
        lines, rest = split_lines(rest + (text if text.isascii() else _C1.sub("", text)))
        yield from filter(None, lines)
    rest += decoder.decode(b"", final=True)
    if rest:
        yield clean(rest)


def split_lines(text: str) -> tuple[list[str], str]:
    """Split text into complete, clean lines and the unfinished rest."""
    lines = text.splitlines()
    rest = lines.pop() if lines and text[-1] not in "\r\n" else ""
    pieces: list[str] = []
    for line in lines:
        if len(line) > MAX_LINE:
            pieces += _cut(line)
        else:
            pieces.append(line)
    if len(rest) > MAX_LINE:
        *whole, rest = _cut(rest)
        pieces += whole
    return ([clean(piece) for piece in pieces] if "\x1b" in text else pieces), rest


def clean(line: str) -> str:
    """Drop ANSI escapes, and what is left of broken ones."""
    return _ANSI.sub("", line).replace("\x1b", "") if "\x1b" in line else line


def _cut(line: str) -> list[str]:
    pieces: list[str] = []
    start = 0
    while len(line) - start > MAX_LINE:
        end = _iteration_start(line, start + 1, start + MAX_LINE)
        pieces.append(line[start:end])
        start = end
    pieces.append(line[start:])
    return pieces


def _iteration_start(line: str, low: int, high: int) -> int:
    """Where the last iteration's text in a stretch starts, so that a cut there harms none."""
    place = line.rfind(_ITERATION, low, high)
    while place >= 0:
        # "elapsed time per iteration (ms)" holds the word too.
        if line[place + len(_ITERATION) : place + 20].lstrip()[:1].isdigit():
            return place
        place = line.rfind(_ITERATION, low, place)
    return high


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as raw:
        magic = raw.read(2)
        raw.seek(0)
        if magic != _GZIP_MAGIC:
            yield from iter(lambda: raw.read(CHUNK_BYTES), b"")
            return
        yield from _gzip_chunks(cast(IO[bytes], raw))


def _gzip_chunks(raw: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw) as unpacked:
        while True:
            try:
                chunk = unpacked.read(CHUNK_BYTES)
            except (EOFError, zlib.error, gzip.BadGzipFile):
                return  # Cut or damaged: what came before it still counts.
            if not chunk:
                return
            yield chunk
