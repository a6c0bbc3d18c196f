"""A `.bin/.idx` pair on disk: its format, and cheap checks before a run, without torch.

The `.idx` is that of `megatron/core/datasets/indexed_dataset.py`:
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

from tools.preprocess.dataset.manifest import Manifest, manifest_path, read_manifest
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


_REMAKE = "make the data set again"
_INTEGER_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")


@dataclass(frozen=True)
class Dataset:
    """A data set whose two files agree with each other and with the manifest, if there is one."""

    prefix: Path
    documents: int
    sequences: int
    """Documents that are not empty; more than documents if these hold sentences."""
    tokens: int
    dtype: str
    manifest: Manifest | None

    @property
    def vocabulary(self) -> int | None:
        """Entries of the tokenizer; with the two below only known from a manifest."""
        return self.manifest.identity.vocabulary if self.manifest else None

    @property
    def tokenizer(self) -> str | None:
        """Its name."""
        return self.manifest.identity.tokenizer if self.manifest else None

    @property
    def bin_sha256(self) -> str | None:
        """Of the tokens."""
        return self.manifest.bin_sha256 if self.manifest else None

    @property
    def bin_path(self) -> Path:
        """The tokens."""
        return bin_path(self.prefix)

    @property
    def idx_path(self) -> Path:
        """The index."""
        return idx_path(self.prefix)

    @property
    def header(self) -> IndexHeader:
        """What the index begins with."""
        return IndexHeader(self.dtype, self.sequences, self.documents)

    def token_chunks(self) -> Iterator[IntArray]:
        """All tokens, a chunk at a time, as all of the following."""
        return read_array(self.bin_path, 0, self.dtype, self.tokens)

    def lengths(self) -> Iterator[IntArray]:
        """Tokens of each sequence."""
        return read_array(self.idx_path, self.header.lengths_offset, "<i4", self.sequences)

    def pointers(self) -> Iterator[IntArray]:
        """Byte of the `.bin` that each sequence starts at."""
        return read_array(self.idx_path, self.header.pointers_offset, "<i8", self.sequences)

    def boundaries(self) -> Iterator[IntArray]:
        """Sequences before each document boundary: documents + 1 numbers."""
        count = self.documents + 1
        return read_array(self.idx_path, self.header.boundaries_offset, "<i8", count)


def bin_path(prefix: Path) -> Path:
    """`prefix` + `.bin`."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`prefix` + `.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def strip_suffix(path: Path) -> Path:
    """The prefix that a path means which may end in `.bin` or `.idx`."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def open_dataset(prefix: Path) -> Dataset:
    """Check a data set in a fraction of a second and describe it.

    Args:
        prefix: Path without suffix, such as `owt-ds/sample_text_document`.

    Raises:
        DatasetError: A file is missing or cut, the files do not fit each other or the manifest.
    """
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            raise DatasetError(f"{path} does not exist; {_REMAKE} (make prepare-ds-sample).")
    header = read_header(idx_path(prefix))
    tokens = _check_sizes(prefix, header)
    manifest = read_manifest(prefix)
    if manifest is not None:
        _check_manifest(prefix, header, tokens, manifest)
    return Dataset(prefix, header.documents, header.sequences, tokens, header.dtype, manifest)


def largest_token(dataset: Dataset, sample: int = 1 << 20) -> int:
    """Largest token id among `sample` tokens, spread over the whole `.bin`; -1 if it is empty.

    Reads all tokens if there are no more than `sample`, so a vocabulary that is too small for the
    data set is found even without a manifest.
    """
    if dataset.tokens == 0:
        return -1
    tokens = np.memmap(dataset.bin_path, dtype=dataset.dtype, mode="r")
    pieces = 64
    length = max(1, sample // pieces)
    if dataset.tokens <= length * pieces:
        return int(tokens.max())
    starts = np.linspace(0, dataset.tokens - length, pieces).astype(np.int64)
    return max(int(tokens[start : start + length].max()) for start in starts)


def _check_sizes(prefix: Path, header: IndexHeader) -> int:
    """Compare the index with its own size and with the `.bin`'s; the number of tokens."""
    index, data = idx_path(prefix), bin_path(prefix)
    if header.dtype not in _INTEGER_DTYPES:
        raise DatasetError(f"{index} holds {header.dtype} values, not token ids; {_REMAKE}.")
    _check_size(index, header.size_bytes, "its header asks for")
    wanted, sequences = _bytes_indexed(index, header)
    if sequences != header.sequences:
        raise DatasetError(
            f"{index} ends its documents after {sequences} sequences but holds "
            f"{header.sequences}; {_REMAKE}."
        )
    _check_size(data, wanted, f"{index.name} describes")
    return wanted // np.dtype(header.dtype).itemsize


def _check_size(path: Path, wanted: int, by: str) -> None:
    found = path.stat().st_size
    if found != wanted:
        raise DatasetError(
            f"{path} is {found} bytes where {by} {wanted}; "
            f"it is {'cut short' if found < wanted else 'too long'}, so {_REMAKE}."
        )


def _bytes_indexed(index: Path, header: IndexHeader) -> tuple[int, int]:
    """Bytes of `.bin` that the last sequence ends at, and the last document boundary."""
    with index.open("rb") as stream:
        stream.seek(header.boundaries_offset + 8 * header.documents)
        boundary = int(np.frombuffer(stream.read(8), dtype="<i8")[0])
        if header.sequences == 0:
            return 0, boundary
        stream.seek(header.pointers_offset - 4)
        length = int(np.frombuffer(stream.read(4), dtype="<i4")[0])
        stream.seek(header.boundaries_offset - 8)
        pointer = int(np.frombuffer(stream.read(8), dtype="<i8")[0])
    return pointer + length * np.dtype(header.dtype).itemsize, boundary


def _check_manifest(prefix: Path, header: IndexHeader, tokens: int, manifest: Manifest) -> None:
    for what, in_manifest, found in (
        ("documents", manifest.documents, header.documents),
        ("sequences", manifest.sequences, header.sequences),
        ("tokens", manifest.tokens, tokens),
        ("dtype", manifest.dtype, header.dtype),
    ):
        if in_manifest != found:
            raise DatasetError(
                f"{manifest_path(prefix)} says {what} {in_manifest}, but the files say {found}; "
                "they belong to different data sets: remove the manifest, or make all three again."
            )
