"""Read, write and check one data set in Megatron's format: `PREFIX.bin`, `PREFIX.idx` and a manifest.

`prefix` is always the path without suffix, such as `owt-ds/sample_text_document`. `open_dataset` checks the
files in a fraction of a second and returns a `Dataset`. The `.bin` holds the token ids, one after another.
`PREFIX.manifest.json` records how this kit made the data set, with hashes of both files; data sets that
other tools made have no manifest.

The `.idx` has the format of Megatron 0.19's `megatron/core/datasets/indexed_dataset.py`, little-endian:

* the header `magic[9] version:u64 dtype:u8 sequences:u64 boundaries:u64`;
* the length of each sequence in tokens (int32);
* the byte offset of each sequence in the `.bin` (int64);
* the number of sequences before each document boundary (int64; documents + 1 numbers).

This module imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.io import compute_sha256, flush_to_disk, write_record

MAGIC = b"MMIDIDX\x00\x00"
"""First bytes of an `.idx` file."""
VERSION = 1
"""Version of the `.idx` format that this module reads and writes."""
LARGEST_UINT16_VOCABULARY = 65499
"""Largest vocabulary whose token ids Megatron stores as uint16 (`DType.optimal_dtype`); above, int32."""
CHUNK = 1 << 20
"""Numbers of a file that are in memory at a time."""

TokenType = np.dtype[Any]
IntArray = NDArray[Any]

FULLY_HASHED_BYTES = 1 << 30
"""Size up to which a file is hashed from its first to its last byte if no manifest states its hash."""

_NUM_SAMPLES = 64
"""Ranges of a `.bin` that `largest_token` looks at, and that the hash of a large file covers."""
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
"""Types of token ids; the header stores the type's position in this tuple, counted from 1."""
_REMAKE_ADVICE = "make the data set again"


class DatasetError(Exception):
    """Error of a data set that cannot be used or made.

    Its text is one sentence that names the file, the value and the remedy.
    """


@dataclass(frozen=True)
class InputIdentity:
    """Identity of one input file at the time when its documents were read."""

    name: str
    size_bytes: int
    modified_ns: int
    """Modification time in nanoseconds since the epoch; 0 if the input has none."""
    edges_sha256: str
    """Hash of the first and the last MiB: fast, and different after nearly every change of content."""


@dataclass(frozen=True)
class RunIdentity:
    """Inputs and settings of a preprocessing run that determine every byte of its data set.

    A run resumes only if its identity equals the recorded identity.
    """

    inputs: tuple[InputIdentity, ...]
    tokenizer: str
    tokenizer_sha256: str
    vocabulary: int
    """Entries of the tokenizer."""
    eod: int | None
    """Token id appended to each document; None without `--append-eod`."""
    json_keys: tuple[str, ...]
    part: str
    """`i/n` of `--shard`; `0/1` is the whole input."""
    shard_bytes: int
    """Bytes of input between two commits."""
    max_document_bytes: int | None
    """Limit above which a document is left out; None is no limit."""
    text_documents: str | None = None
    """Stretch of a `.txt` file that is one document; None if no input is a `.txt` file of plain text."""


@dataclass(frozen=True)
class ShardHash:
    """Size and hash of one shard: tokens of the `.bin` that one commit or one merged data set wrote."""

    tokens: int
    text_bytes: int
    """UTF-8 bytes of the shard's documents, without JSON syntax."""
    sha256: str
    """Hash of the `.bin` from the start of the file to the end of this shard."""


@dataclass(frozen=True)
class Manifest:
    """Content of `PREFIX.manifest.json`: how a data set was made, its counts and its hashes."""

    json_key: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    text_bytes: int
    bin_sha256: str
    idx_sha256: str
    engine: str
    """Program that encoded the text: `gigatoken` or `tokenizers`."""
    problems: dict[str, int]
    """Number of documents that were left out or are unusual, by kind of problem."""
    identity: RunIdentity
    shards: tuple[ShardHash, ...]
    schema: int = 1


@dataclass(frozen=True)
class Dataset:
    """Description of a data set whose files agree with each other and with the manifest.

    The arrays are mapped from the files and not read, so chunks of a data set of any size fit into memory.
    """

    prefix: Path
    """Path without suffix."""
    dtype: str
    """Type of a token id, such as `uint16`."""
    documents: int
    sequences: int
    """Number of sequences. An empty document has none, and a document of sentences has several."""
    tokens: int
    manifest: Manifest | None
    """None if `PREFIX.manifest.json` does not exist."""

    @property
    def idx_path(self) -> Path:
        """Path of the index, `PREFIX.idx`."""
        return idx_path(self.prefix)

    @property
    def bin_path(self) -> Path:
        """Path of the tokens, `PREFIX.bin`."""
        return bin_path(self.prefix)

    @property
    def vocabulary(self) -> int | None:
        """Number of entries of the tokenizer; None without a manifest."""
        return self.manifest.identity.vocabulary if self.manifest else None

    @property
    def bin_sha256(self) -> str | None:
        """Hash of the `.bin` as the manifest records it; None without a manifest."""
        return self.manifest.bin_sha256 if self.manifest else None

    @property
    def content_sha256(self) -> str:
        """Hash of the present `.bin`: the manifest's if no file is newer, else computed (`hash_file`)."""
        manifest = self._current_manifest
        return manifest.bin_sha256 if manifest else hash_file(self.bin_path)

    @property
    def index_sha256(self) -> str:
        """Hash of the present `.idx`: the manifest's if no file is newer, else computed (`hash_file`)."""
        manifest = self._current_manifest
        return manifest.idx_sha256 if manifest else hash_file(self.idx_path)

    @property
    def _current_manifest(self) -> Manifest | None:
        """The manifest, or None if there is none or if `.idx` or `.bin` was written after it.

        A later file may come from another tool, even if its counts agree with the manifest.
        """
        if self.manifest is None:
            return None
        written_ns = manifest_path(self.prefix).stat().st_mtime_ns
        newest_ns = max(path.stat().st_mtime_ns for path in (self.idx_path, self.bin_path))
        return self.manifest if newest_ns <= written_ns else None

    @property
    def stored(self) -> IntArray:
        """All token ids, mapped from the `.bin`; the file must not be empty."""
        return np.memmap(self.bin_path, self.dtype, "r")

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each sequence."""
        return _map_index_array(self.idx_path, "<i4", offset=0, count=self.sequences)

    @property
    def pointers(self) -> IntArray:
        """Byte offset of each sequence in the `.bin`."""
        offset = 4 * self.sequences
        return _map_index_array(self.idx_path, "<i8", offset=offset, count=self.sequences)

    @property
    def boundaries(self) -> IntArray:
        """Number of sequences before each document boundary: documents + 1 numbers."""
        offset = 12 * self.sequences
        return _map_index_array(self.idx_path, "<i8", offset=offset, count=self.documents + 1)

    def tokens_before(self, sequences: IntArray) -> IntArray:
        """Return the number of tokens before each of the sequences with these indices.

        An index past the last sequence gives the number of all tokens.
        """
        counts = np.full(len(sequences), self.tokens, np.int64)
        is_inside = sequences < self.sequences
        byte_offsets = self.pointers[sequences[is_inside]]
        counts[is_inside] = byte_offsets // np.dtype(self.dtype).itemsize
        return counts

    def token_chunks(self) -> Iterator[IntArray]:
        """Yield all token ids in order, in arrays of at most CHUNK numbers.

        The tokens are read and not mapped, because mapped pages would count as resident memory.
        """
        with self.bin_path.open("rb") as stream:
            while len(chunk := np.fromfile(stream, self.dtype, CHUNK)):
                yield chunk


def _map_index_array(path: Path, dtype: str, *, offset: int, count: int) -> IntArray:
    """Return `count` numbers of an `.idx`, mapped from `offset` bytes after the header."""
    return np.memmap(path, dtype, "r", _HEADER.size + offset, (count,))


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    A file larger than FULLY_HASHED_BYTES is not read completely. Its hash covers its size and `_NUM_SAMPLES` ranges
    of 1 MiB, spread from the first to the last byte, and starts with `sampled-`. An unchanged file is read once per
    process.
    """
    status = path.stat()
    return _hash_unchanged_file(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _hash_unchanged_file(path: Path, size_bytes: int, _modified_ns: int) -> str:
    """Return the hash that `hash_file` describes. Results are cached by path, size and time stamp of the file."""
    if size_bytes <= FULLY_HASHED_BYTES:
        return compute_sha256(path)
    digest = hashlib.sha256(str(size_bytes).encode())
    with path.open("rb") as stream:
        for start in np.linspace(0, size_bytes - CHUNK, _NUM_SAMPLES).astype(np.int64):
            stream.seek(int(start))
            digest.update(stream.read(CHUNK))
    return f"sampled-{digest.hexdigest()}"


def iterate_chunks(count: int) -> Iterator[slice]:
    """Yield slices of at most CHUNK indices that cover `range(count)` in order."""
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


def _split_into_chunks(arrays: Iterable[IntArray]) -> Iterator[IntArray]:
    """Yield the arrays in order, each in pieces of at most CHUNK numbers."""
    for array in arrays:
        for chunk in iterate_chunks(len(array)):
            yield array[chunk]


def bin_path(prefix: Path) -> Path:
    """Return the path of the tokens: `prefix` + `.bin`."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return the path of the index: `prefix` + `.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def manifest_path(prefix: Path) -> Path:
    """Return the path of the manifest: `prefix` + `.manifest.json`."""
    return prefix.with_name(prefix.name + ".manifest.json")


def strip_suffix(path: Path) -> Path:
    """Return the path without `.bin` or `.idx`; any other path is returned unchanged."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def token_dtype(vocabulary: int) -> TokenType:
    """Return the type that stores the token ids of a vocabulary with this number of entries."""
    return np.dtype(np.uint16 if vocabulary <= LARGEST_UINT16_VOCABULARY else np.int32)


@dataclass(frozen=True)
class DocumentIndex:
    """Lengths and document boundaries of consecutive sequences of a data set."""

    lengths: IntArray
    """Number of tokens of each sequence."""
    boundaries: IntArray
    """Number of sequences before each document boundary; it starts at 0 and has documents + 1 numbers."""


def write_index(path: Path, dtype: str, pieces: Callable[[], Iterable[DocumentIndex]]) -> None:
    """Write one `.idx` for all pieces in order, in bounded memory, and flush the file to the disk.

    Args:
        path: The `.idx` file. An existing file is overwritten.
        dtype: Type of the token ids in the `.bin`, such as `uint16`.
        pieces: Function that returns the pieces. It is called several times and must return the same
            pieces each time.
    """
    sequences = sum(len(piece.lengths) for piece in pieces())
    documents = sum(len(piece.boundaries) - 1 for piece in pieces())
    with path.open("wb") as stream:
        code = _DTYPES.index(dtype) + 1
        stream.write(_HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
        for lengths in _split_into_chunks(piece.lengths for piece in pieces()):
            stream.write(lengths.astype("<i4").data)
        _write_pointers(stream, np.dtype(dtype).itemsize, pieces())
        _write_boundaries(stream, pieces())
        flush_to_disk(stream)


def _write_pointers(stream: BinaryIO, itemsize: int, pieces: Iterable[DocumentIndex]) -> None:
    """Write the byte of the `.bin` at which each sequence starts. `itemsize` is the number of bytes per token."""
    chunk_start = 0
    for lengths in _split_into_chunks(piece.lengths for piece in pieces):
        ends = chunk_start + itemsize * np.cumsum(lengths, dtype=np.int64)
        starts = ends - itemsize * lengths.astype(np.int64)
        stream.write(starts.astype("<i8").data)
        chunk_start = int(ends[-1])


def _write_boundaries(stream: BinaryIO, pieces: Iterable[DocumentIndex]) -> None:
    """Write the index of the sequence at which each document starts, and the number of sequences as the last one."""
    stream.write(np.array(0, "<i8").tobytes())
    sequences_before = 0
    for piece in pieces:
        # The first boundary of a piece is the last boundary of the piece before it.
        for boundaries in _split_into_chunks([piece.boundaries[1:]]):
            stream.write((sequences_before + boundaries).astype("<i8").data)
        sequences_before += len(piece.lengths)


def open_dataset(prefix: Path) -> Dataset:
    """Check a data set in a fraction of a second and return its description.

    The check covers the header, the sizes of both files and the manifest's counts. Tokens and hashes are not checked.
    `verify_dataset` checks them.

    Raises:
        DatasetError: A file is missing, damaged or cut short, or the files do not belong together.
    """
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            raise DatasetError(f"{path} does not exist; {_advise_how_to_make(prefix)}.")
    dtype, sequences, documents = _read_header(idx_path(prefix))
    unchecked = Dataset(
        prefix, dtype, documents=documents, sequences=sequences, tokens=0, manifest=None
    )
    tokens = _check_sizes(unchecked)
    manifest = read_manifest(prefix)
    dataset = replace(unchecked, tokens=tokens, manifest=manifest)
    if manifest is not None:
        _check_counts(dataset, manifest)
    return dataset


def _check_counts(dataset: Dataset, manifest: Manifest) -> None:
    """Raise DatasetError if the manifest records other counts or another dtype than the files have."""
    for name in ("documents", "sequences", "tokens", "dtype"):
        recorded, actual = getattr(manifest, name), getattr(dataset, name)
        if recorded != actual:
            raise DatasetError(
                f"{manifest_path(dataset.prefix)} says {name} {recorded}, but the files say {actual}; "
                "they belong to different data sets: remove the manifest, or make all three again."
            )


def _advise_how_to_make(prefix: Path) -> str:
    """Return the end of a sentence that says how to make a data set that does not exist."""
    name = prefix.name.removesuffix("_text_document")
    if name == "sample":
        return "run 'make prepare-ds-sample'"
    return f"run 'make prepare-ds INPUT=file.jsonl NAME={name}', or name another data set"


def read_manifest(prefix: Path) -> Manifest | None:
    """Read `PREFIX.manifest.json`, and return its content, or None if the file does not exist.

    Raises:
        DatasetError: The file exists but is not a manifest.
    """
    path = manifest_path(prefix)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"{path} is not a manifest of this tool ({error}); remove it to do without."
        ) from None


def write_manifest(
    prefix: Path,
    json_key: str,
    engine: str,
    problems: Mapping[str, int],
    identity: RunIdentity,
    shards: Sequence[ShardHash],
) -> None:
    """Write `PREFIX.manifest.json` for the finished `.bin` and `.idx` at `prefix`, and flush it to the disk.

    Args:
        prefix: Path of the data set without suffix.
        json_key: Key of the text in the input's JSON lines.
        engine: Program that encoded the text.
        problems: Number of documents by kind of problem.
        identity: Input files and settings of the tokenization.
        shards: Size and hash of all shards of the `.bin` in order. There must be at least one.
    """
    dataset = open_dataset(prefix)
    # The hash of a shard covers the `.bin` from its first byte to the shard's end, so the last shard's hash
    # is that of the full file.
    bin_sha256 = shards[-1].sha256
    manifest = Manifest(
        json_key=json_key,
        documents=dataset.documents,
        sequences=dataset.sequences,
        tokens=dataset.tokens,
        dtype=dataset.dtype,
        text_bytes=sum(shard.text_bytes for shard in shards),
        bin_sha256=bin_sha256,
        idx_sha256=compute_sha256(dataset.idx_path),
        engine=engine,
        problems=dict(problems),
        identity=identity,
        shards=tuple(shards),
    )
    write_record(manifest_path(prefix), manifest, durable=True)


def largest_token(dataset: Dataset, sample: int = 1 << 20) -> int:
    """Return the largest token id among about `sample` tokens, or -1 if the data set has no tokens.

    The tokens come from `_NUM_SAMPLES` ranges that are spread evenly over the `.bin`. The check finds most
    vocabularies that are too small, also without a manifest.
    """
    if dataset.tokens == 0:
        return -1
    tokens = dataset.stored
    length = max(1, sample // _NUM_SAMPLES)
    last_start = max(0, dataset.tokens - length)
    starts = np.linspace(0, last_start, _NUM_SAMPLES).astype(np.int64)
    return max(int(tokens[start : start + length].max()) for start in starts)


def _read_header(path: Path) -> tuple[str, int, int]:
    """Return the dtype and the numbers of sequences and documents that an `.idx` declares.

    Raises:
        DatasetError: The file does not start with a header of this format.
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
    return _DTYPES[code - 1], sequences, boundaries - 1


def _check_sizes(dataset: Dataset) -> int:
    """Check the sizes of the `.idx` and the `.bin`, and return the number of tokens of the data set.

    Raises:
        DatasetError: A file has another size, or the last document does not end at the last sequence.
    """
    path, dtype, sequences = dataset.idx_path, dataset.dtype, dataset.sequences
    if dtype.startswith("float"):
        raise DatasetError(f"{path} holds {dtype} values, not token ids; {_REMAKE_ADVICE}.")
    idx_bytes = _HEADER.size + 12 * sequences + 8 * (dataset.documents + 1)
    _check_size(path, idx_bytes, "its header asks for")
    last_boundary = int(dataset.boundaries[-1])
    if last_boundary != sequences:
        raise DatasetError(
            f"{path} ends its documents after {last_boundary} sequences but holds {sequences}; "
            f"{_REMAKE_ADVICE}."
        )
    itemsize = np.dtype(dtype).itemsize
    bin_bytes = 0
    if sequences:
        bin_bytes = int(dataset.pointers[-1]) + itemsize * int(dataset.lengths[-1])
    _check_size(dataset.bin_path, bin_bytes, f"{path.name} describes")
    return bin_bytes // itemsize


def _check_size(path: Path, expected_bytes: int, source: str) -> None:
    """Raise DatasetError if the size of a file is not `expected_bytes`.

    Args:
        source: Part of the error's sentence that says where the expected size comes from, such as "its header asks
            for".
    """
    actual_bytes = path.stat().st_size
    if actual_bytes != expected_bytes:
        fault = "cut short" if actual_bytes < expected_bytes else "too long"
        raise DatasetError(
            f"{path} is {actual_bytes} bytes where {source} {expected_bytes}; "
            f"it is {fault}, so {_REMAKE_ADVICE}."
        )
