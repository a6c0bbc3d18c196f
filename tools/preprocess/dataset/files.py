"""A `.bin/.idx` pair on disk: cheap checks before a run, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.preprocess.dataset.index import IndexHeader, IntArray, read_array, read_header
from tools.preprocess.dataset.manifest import Manifest, manifest_path, read_manifest
from tools.preprocess.errors import DatasetError

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
    vocabulary: int | None = None
    """Entries of the tokenizer; with the two below only known from a manifest."""
    tokenizer: str | None = None
    bin_sha256: str | None = None

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
    return Dataset(
        prefix=prefix,
        documents=header.documents,
        sequences=header.sequences,
        tokens=tokens,
        dtype=header.dtype,
        vocabulary=manifest.identity.vocabulary if manifest else None,
        tokenizer=manifest.identity.tokenizer if manifest else None,
        bin_sha256=manifest.bin_sha256 if manifest else None,
    )


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
    index_size = index.stat().st_size
    if index_size != header.size_bytes:
        raise DatasetError(
            f"{index} is {index_size} bytes where its header asks for {header.size_bytes}; "
            f"it is {'cut short' if index_size < header.size_bytes else 'too long'}, so {_REMAKE}."
        )
    wanted, sequences = _bytes_indexed(index, header)
    if sequences != header.sequences:
        raise DatasetError(
            f"{index} ends its documents after {sequences} sequences but holds "
            f"{header.sequences}; {_REMAKE}."
        )
    found = data.stat().st_size
    if found != wanted:
        raise DatasetError(
            f"{data} is {found} bytes where {index.name} describes {wanted}; "
            f"it is {'cut short' if found < wanted else 'too long'}, so {_REMAKE}."
        )
    return found // np.dtype(header.dtype).itemsize


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
