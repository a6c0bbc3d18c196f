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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.preprocess.dataset.manifest import Manifest, manifest_path, read_manifest
from tools.preprocess.errors import DatasetError
from tools.records.io import flush_to_disk

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
LARGEST_UINT16_VOCABULARY = 65499
"""Megatron's `DType.optimal_dtype`: uint16 below 65,500 entries, int32 from there on."""

TokenType = np.dtype[Any]
IntArray = NDArray[Any]

_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
"""By their code in the header, which counts from 1."""
_CHUNK = 1 << 20
"""Sequences (or documents) held in memory at a time while an index is written or read."""
_REMAKE = "make the data set again"


@dataclass(frozen=True)
class Index:
    """An `.idx`: its header, and its three arrays a chunk at a time."""

    idx_path: Path
    dtype: str
    sequences: int
    """Documents that are not empty; more than documents if these hold sentences."""
    documents: int

    @property
    def size_bytes(self) -> int:
        """Size of the whole file that the header describes."""
        return _HEADER.size + 12 * self.sequences + 8 * (self.documents + 1)

    def lengths(self, first: int = 0) -> Iterator[IntArray]:
        """Tokens of each sequence."""
        return read_array(self.idx_path, _HEADER.size + 4 * first, "<i4", self.sequences - first)

    def pointers(self, first: int = 0, count: int | None = None) -> Iterator[IntArray]:
        """Byte of the `.bin` that each sequence starts at."""
        offset = _HEADER.size + 4 * self.sequences + 8 * first
        count = self.sequences - first if count is None else count
        return read_array(self.idx_path, offset, "<i8", count)

    def boundaries(self, first: int = 0, count: int | None = None) -> Iterator[IntArray]:
        """Sequences before each document boundary: documents + 1 numbers."""
        offset = _HEADER.size + 12 * self.sequences + 8 * first
        count = self.documents + 1 - first if count is None else count
        return read_array(self.idx_path, offset, "<i8", count)


@dataclass(frozen=True)
class Dataset(Index):
    """A data set whose two files agree with each other and with the manifest, if there is one."""

    tokens: int
    manifest: Manifest | None

    @property
    def prefix(self) -> Path:
        """Path without suffix."""
        return self.idx_path.with_suffix("")

    @property
    def bin_path(self) -> Path:
        """The tokens."""
        return bin_path(self.prefix)

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

    def token_chunks(self) -> Iterator[IntArray]:
        """All tokens, a chunk at a time."""
        return read_array(self.bin_path, 0, self.dtype, self.tokens)


def bin_path(prefix: Path) -> Path:
    """`prefix` + `.bin`."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`prefix` + `.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def strip_suffix(path: Path) -> Path:
    """The prefix that a path means which may end in `.bin` or `.idx`."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def token_dtype(vocabulary: int) -> TokenType:
    """Type of a token id on disk for a vocabulary of this many entries."""
    return np.dtype(np.uint16 if vocabulary <= LARGEST_UINT16_VOCABULARY else np.int32)


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


def write_index(
    index: Index, lengths: Callable[[], Iterable[IntArray]], boundaries: Iterable[IntArray]
) -> None:
    """Write an index chunk by chunk, so in bounded memory, and have it on the disk.

    Args:
        index: Where, and what the numbers add up to.
        lengths: Tokens of each sequence; called twice.
        boundaries: Sequences before each document boundary but the first, which is 0.
    """
    code = _DTYPES.index(index.dtype) + 1
    itemsize = np.dtype(index.dtype).itemsize
    with index.idx_path.open("wb") as stream:
        stream.write(_HEADER.pack(MAGIC, VERSION, code, index.sequences, index.documents + 1))
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
        flush_to_disk(stream)


def read_index(path: Path) -> Index:
    """Read and check the header.

    Raises:
        DatasetError: Too short, another format, or an unknown dtype.
    """
    with path.open("rb") as stream:
        raw = stream.read(_HEADER.size)
    if len(raw) < _HEADER.size or raw[: len(MAGIC)] != MAGIC:
        raise DatasetError(f"{path} is no Megatron index: its header is damaged; make it again.")
    _, version, code, sequences, boundaries = _HEADER.unpack(raw)
    if version != VERSION or not 1 <= code <= len(_DTYPES) or boundaries < 1:
        raise DatasetError(
            f"{path} has an unreadable header (version {version}, dtype code {code}, "
            f"{boundaries} document boundaries); make it again."
        )
    return Index(path, _DTYPES[code - 1], sequences, boundaries - 1)


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
    index = read_index(idx_path(prefix))
    tokens = _check_sizes(index, bin_path(prefix))
    manifest = read_manifest(prefix)
    dataset = Dataset(**vars(index), tokens=tokens, manifest=manifest)
    for what in ("documents", "sequences", "tokens", "dtype") if manifest else ():
        said, found = getattr(manifest, what), getattr(dataset, what)
        if said != found:
            raise DatasetError(
                f"{manifest_path(prefix)} says {what} {said}, but the files say {found}; they "
                "belong to different data sets: remove the manifest, or make all three again."
            )
    return dataset


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


def _check_sizes(index: Index, data: Path) -> int:
    """Compare the index with its own size and with the `.bin`'s; the number of tokens."""
    if index.dtype.startswith("float"):
        raise DatasetError(
            f"{index.idx_path} holds {index.dtype} values, not token ids; {_REMAKE}."
        )
    _check_size(index.idx_path, index.size_bytes, "its header asks for")
    (boundary,) = next(index.boundaries(index.documents))
    if boundary != index.sequences:
        raise DatasetError(
            f"{index.idx_path} ends its documents after {boundary} sequences but holds "
            f"{index.sequences}; {_REMAKE}."
        )
    itemsize = np.dtype(index.dtype).itemsize
    last = max(index.sequences - 1, 0)
    wanted = 0  # without sequences
    for pointers, lengths in zip(index.pointers(last), index.lengths(last), strict=True):
        wanted = int(pointers[-1]) + itemsize * int(lengths[-1])
    _check_size(data, wanted, f"{index.idx_path.name} describes")
    return wanted // itemsize


def _check_size(path: Path, wanted: int, by: str) -> None:
    found = path.stat().st_size
    if found != wanted:
        raise DatasetError(
            f"{path} is {found} bytes where {by} {wanted}; "
            f"it is {'cut short' if found < wanted else 'too long'}, so {_REMAKE}."
        )
