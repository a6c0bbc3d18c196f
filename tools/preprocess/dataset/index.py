"""Megatron's `.idx` format, after `megatron/core/datasets/indexed_dataset.py`.

`magic[9] version:u64 dtype:u8 sequences:u64 boundaries:u64`, then for each sequence its length
(int32) and its byte offset in the `.bin` (int64), then for each document boundary the number of
sequences before it (int64; documents + 1 of them). All little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tools.preprocess.errors import DatasetError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
LARGEST_UINT16_VOCABULARY = 65499
"""Megatron's `DType.optimal_dtype`: uint16 below 65,500 entries, int32 from there on."""

TokenType = np.dtype[Any]
IntArray = NDArray[Any]

_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_BY_CODE = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
_CODE_BY_DTYPE = {name: code for code, name in _DTYPE_BY_CODE.items()}
_CHUNK = 1 << 20
"""Sequences (or documents) held in memory at a time while an index is written or read."""


@dataclass(frozen=True)
class IndexHeader:
    """The first 34 bytes of an `.idx`."""

    dtype: str
    sequences: int
    documents: int

    @property
    def size_bytes(self) -> int:
        """Size of the whole file that this header describes."""
        return _HEADER.size + 12 * self.sequences + 8 * (self.documents + 1)

    @property
    def lengths_offset(self) -> int:
        """Where the sequence lengths (int32) start, in bytes."""
        return _HEADER.size

    @property
    def pointers_offset(self) -> int:
        """Where the sequences' byte offsets (int64) start, in bytes."""
        return _HEADER.size + 4 * self.sequences

    @property
    def boundaries_offset(self) -> int:
        """Where the document boundaries (int64) start, in bytes."""
        return _HEADER.size + 12 * self.sequences


def token_dtype(vocabulary: int) -> TokenType:
    """Type of a token id on disk for a vocabulary of this many entries."""
    return np.dtype(np.uint16 if vocabulary <= LARGEST_UINT16_VOCABULARY else np.int32)


def read_header(path: Path) -> IndexHeader:
    """Read and check the header.

    Raises:
        DatasetError: Too short, another format, or an unknown dtype.
    """
    with path.open("rb") as stream:
        raw = stream.read(_HEADER.size)
    if len(raw) < _HEADER.size or raw[: len(MAGIC)] != MAGIC:
        raise DatasetError(f"{path} is no Megatron index: its header is damaged; make it again.")
    _, version, code, sequences, boundaries = _HEADER.unpack(raw)
    if version != VERSION or code not in _DTYPE_BY_CODE or boundaries < 1:
        raise DatasetError(
            f"{path} has an unreadable header (version {version}, dtype code {code}, "
            f"{boundaries} document boundaries); make it again."
        )
    return IndexHeader(_DTYPE_BY_CODE[code], sequences, boundaries - 1)


def write_index(
    stream: BinaryIO,
    header: IndexHeader,
    lengths: Callable[[], Iterable[IntArray]],
    boundaries: Iterable[IntArray],
) -> None:
    """Write an index chunk by chunk, so in bounded memory.

    Args:
        stream: Where to write.
        header: What the numbers add up to.
        lengths: Tokens of each sequence; called twice.
        boundaries: Sequences before each document boundary but the first, which is 0.
    """
    code = _CODE_BY_DTYPE[header.dtype]
    itemsize = np.dtype(header.dtype).itemsize
    stream.write(_HEADER.pack(MAGIC, VERSION, code, header.sequences, header.documents + 1))
    for chunk in lengths():
        stream.write(chunk.astype("<i4").data)
    start = 0
    for chunk in lengths():
        ends = start + itemsize * np.cumsum(chunk, dtype=np.int64)
        stream.write((ends - itemsize * chunk.astype(np.int64)).astype("<i8").data)
        start = int(ends[-1]) if len(ends) else start
    stream.write(np.array(0, "<i8").tobytes())
    for chunk in boundaries:
        stream.write(chunk.astype("<i8").data)


def read_array(path: Path, offset: int, dtype: str, count: int) -> Iterator[IntArray]:
    """`count` numbers from byte `offset` on, a million at a time; fewer if the file ends before.

    Reads instead of mapping: mapped pages would count as resident memory.
    """
    with path.open("rb") as stream:
        stream.seek(offset)
        while count > 0:
            chunk = np.fromfile(stream, dtype, min(count, _CHUNK))
            if not len(chunk):
                return
            count -= len(chunk)
            yield chunk
