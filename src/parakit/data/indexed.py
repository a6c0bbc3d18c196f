"""A finished `.bin/.idx` pair: its format, its manifest, and cheap checks before a run, without torch.

Takes a path without suffix, such as `owt-ds/sample_text_document`.

The `.idx` is that of `megatron/core/datasets/indexed_dataset.py`:
`magic[9] version:u64 dtype:u8 sequences:u64 boundaries:u64`, then for each sequence its length
(int32) and its byte offset in the `.bin` (int64), then for each document boundary the number of
sequences before it (int64; documents + 1 of them). All little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.io import flush_to_disk, sha256_of, write_record

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
LARGEST_UINT16_VOCABULARY = 65499
"""Megatron's `DType.optimal_dtype`: uint16 below 65,500 entries, int32 from there on."""
CHUNK = 1 << 20
"""Numbers of a file worked on at a time."""

TokenType = np.dtype[Any]
IntArray = NDArray[Any]

_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
"""By their code in the header, which counts from 1."""
_REMAKE = "make the data set again"


class DatasetError(Exception):
    """A data set cannot be used or made: one sentence that names the thing, the value and the remedy."""


@dataclass(frozen=True)
class InputIdentity:
    """One input as it was when its documents were read."""

    name: str
    size_bytes: int
    modified_ns: int
    """Modification time, ns since the epoch; 0 where the input has none."""
    edges_sha256: str
    """Over the first and the last MiB: cheap, and different for nearly every change of content."""


@dataclass(frozen=True)
class RunIdentity:
    """Everything the bytes of a data set follow from; resuming under another one is refused."""

    inputs: tuple[InputIdentity, ...]
    tokenizer: str
    tokenizer_sha256: str
    vocabulary: int
    eod: int | None
    """Id appended to each document; None without `--append-eod`."""
    json_keys: tuple[str, ...]
    part: str
    """`i/n` of `--shard`; `0/1` is the whole input."""
    shard_bytes: int
    """Input between two commits."""
    max_document_bytes: int | None


@dataclass(frozen=True)
class ShardHash:
    """A stretch of the `.bin` that was committed at once, or came from one data set of a merge."""

    tokens: int
    text_bytes: int
    """UTF-8 bytes of the documents themselves."""
    sha256: str
    """Of the `.bin` from its very start to this stretch's end: one hash serves every stretch."""


@dataclass(frozen=True)
class Manifest:
    """`PREFIX.manifest.json`: what a data set was made of, and hashes to prove it."""

    json_key: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    text_bytes: int
    bin_sha256: str
    idx_sha256: str
    engine: str
    """What encoded it: `gigatoken` or `tokenizers`."""
    problems: dict[str, int]
    """Documents left out or noteworthy, by kind."""
    identity: RunIdentity
    shards: tuple[ShardHash, ...]
    schema: int = 1


@dataclass(frozen=True)
class Dataset:
    """A data set whose two files agree with each other and with the manifest, if there is one.

    The numbers of the index are mapped from the file, not read: chunks of them fit any memory.
    """

    prefix: Path
    """Path without suffix."""
    dtype: str
    documents: int
    sequences: int
    """Documents that are not empty; more than documents if these hold sentences."""
    tokens: int
    manifest: Manifest | None

    @property
    def idx_path(self) -> Path:
        """The index."""
        return idx_path(self.prefix)

    @property
    def bin_path(self) -> Path:
        """The tokens."""
        return bin_path(self.prefix)

    @property
    def vocabulary(self) -> int | None:
        """Entries of the tokenizer; as the hash below only known from a manifest."""
        return self.manifest.identity.vocabulary if self.manifest else None

    @property
    def bin_sha256(self) -> str | None:
        """Of the tokens."""
        return self.manifest.bin_sha256 if self.manifest else None

    @property
    def index_sha256(self) -> str:
        """Hash of the `.idx`: the manifest's, or computed from the file if there is no manifest."""
        return self.manifest.idx_sha256 if self.manifest else sha256_of(self.idx_path)

    @property
    def stored(self) -> IntArray:
        """All tokens, mapped from the file."""
        return np.memmap(self.bin_path, self.dtype, "r")

    @property
    def lengths(self) -> IntArray:
        """Tokens of each sequence."""
        return _index_array(self.idx_path, "<i4", 0, self.sequences)

    @property
    def pointers(self) -> IntArray:
        """Byte of the `.bin` that each sequence starts at."""
        return _index_array(self.idx_path, "<i8", 4 * self.sequences, self.sequences)

    @property
    def boundaries(self) -> IntArray:
        """Sequences before each document boundary: documents + 1 numbers."""
        return _index_array(self.idx_path, "<i8", 12 * self.sequences, self.documents + 1)

    def tokens_before(self, sequences: IntArray) -> IntArray:
        """Tokens before each of these sequences; before one that is past the last, all of them."""
        offsets = np.full(len(sequences), self.tokens, np.int64)
        inside = sequences < self.sequences
        offsets[inside] = self.pointers[sequences[inside]] // np.dtype(self.dtype).itemsize
        return offsets

    def token_chunks(self) -> Iterator[IntArray]:
        """All tokens, a chunk at a time; read, because mapped pages would count as resident memory."""
        with self.bin_path.open("rb") as stream:
            while len(chunk := np.fromfile(stream, self.dtype, CHUNK)):
                yield chunk


def _index_array(path: Path, dtype: str, offset: int, count: int) -> IntArray:
    return np.memmap(path, dtype, "r", _HEADER.size + offset, (count,))


def stretches(count: int) -> Iterator[slice]:
    """So many numbers in stretches that fit any memory."""
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


def _chunked(arrays: Iterable[IntArray]) -> Iterator[IntArray]:
    for array in arrays:
        for part in stretches(len(array)):
            yield array[part]


def bin_path(prefix: Path) -> Path:
    """`prefix` + `.bin`."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`prefix` + `.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def manifest_path(prefix: Path) -> Path:
    """`prefix` + `.manifest.json`."""
    return prefix.with_name(prefix.name + ".manifest.json")


def strip_suffix(path: Path) -> Path:
    """The prefix that a path means which may end in `.bin` or `.idx`."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def token_dtype(vocabulary: int) -> TokenType:
    """Type of a token id on disk for a vocabulary of this many entries."""
    return np.dtype(np.uint16 if vocabulary <= LARGEST_UINT16_VOCABULARY else np.int32)


@dataclass(frozen=True)
class DocumentIndex:
    """A stretch of a data set, as its index describes it."""

    lengths: IntArray
    """Tokens of each sequence."""
    boundaries: IntArray
    """Sequences before each document boundary, from 0 on: documents + 1 numbers."""


def write_index(path: Path, dtype: str, pieces: Callable[[], Iterable[DocumentIndex]]) -> None:
    """Write the index of all pieces in order, in bounded memory, and have it on the disk.

    `pieces` gives the same ones each time it is called.
    """
    itemsize = np.dtype(dtype).itemsize
    sequences = sum(len(piece.lengths) for piece in pieces())
    documents = sum(len(piece.boundaries) - 1 for piece in pieces())
    with path.open("wb") as stream:
        code = _DTYPES.index(dtype) + 1
        stream.write(_HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
        for chunk in _chunked(piece.lengths for piece in pieces()):
            stream.write(chunk.astype("<i4").data)
        start = 0
        for chunk in _chunked(piece.lengths for piece in pieces()):
            ends = start + itemsize * np.cumsum(chunk, dtype=np.int64)
            stream.write((ends - itemsize * chunk.astype(np.int64)).astype("<i8").data)
            start = int(ends[-1])
        stream.write(np.array(0, "<i8").tobytes())
        before = 0
        for piece in pieces():
            for chunk in _chunked([piece.boundaries[1:]]):
                stream.write((before + chunk).astype("<i8").data)
            before += len(piece.lengths)
        flush_to_disk(stream)


def open_dataset(prefix: Path) -> Dataset:
    """Check a data set in a fraction of a second and describe it.

    Raises:
        DatasetError: A file is missing or cut, the files do not fit each other or the manifest.
    """
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            raise DatasetError(f"{path} does not exist; {_how_to_make(prefix)}.")
    dtype, sequences, documents = _read_header(idx_path(prefix))
    tokens = _check_sizes(Dataset(prefix, dtype, documents, sequences, 0, None))
    manifest = read_manifest(prefix)
    dataset = Dataset(prefix, dtype, documents, sequences, tokens, manifest)
    for what in ("documents", "sequences", "tokens", "dtype") if manifest else ():
        said, found = getattr(manifest, what), getattr(dataset, what)
        if said != found:
            raise DatasetError(
                f"{manifest_path(prefix)} says {what} {said}, but the files say {found}; they "
                "belong to different data sets: remove the manifest, or make all three again."
            )
    return dataset


def _how_to_make(prefix: Path) -> str:
    name = prefix.name.removesuffix("_text_document")
    if name == "sample":
        return "run 'make prepare-ds-sample'"
    return f"run 'make prepare-ds INPUT=file.jsonl NAME={name}', or name another data set"


def read_manifest(prefix: Path) -> Manifest | None:
    """Read the manifest beside a data set, None if there is none.

    Raises:
        DatasetError: It is there but is not readable.
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
    """Describe the `.bin` and `.idx` at `prefix`, of which `shards` are all stretches, in order."""
    dataset = open_dataset(prefix)
    manifest = Manifest(
        json_key=json_key,
        documents=dataset.documents,
        sequences=dataset.sequences,
        tokens=dataset.tokens,
        dtype=dataset.dtype,
        text_bytes=sum(shard.text_bytes for shard in shards),
        bin_sha256=shards[-1].sha256,
        idx_sha256=sha256_of(dataset.idx_path),
        engine=engine,
        problems=dict(problems),
        identity=identity,
        shards=tuple(shards),
    )
    write_record(manifest_path(prefix), manifest, durable=True)


def largest_token(dataset: Dataset, sample: int = 1 << 20) -> int:
    """Largest token id among `sample` tokens, spread over the whole `.bin`; -1 if it is empty.

    Reads all tokens if there are no more than `sample`, so a vocabulary that is too small for the
    data set is found even without a manifest.
    """
    if dataset.tokens == 0:
        return -1
    tokens, pieces = dataset.stored, 64
    length = max(1, sample // pieces)
    starts = np.linspace(0, max(0, dataset.tokens - length), pieces).astype(np.int64)
    return max(int(tokens[start : start + length].max()) for start in starts)


def _read_header(path: Path) -> tuple[str, int, int]:
    """Dtype, sequences and documents."""
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
    """Compare the index with its own size and with the `.bin`'s; the number of tokens."""
    path, dtype, sequences = dataset.idx_path, dataset.dtype, dataset.sequences
    if dtype.startswith("float"):
        raise DatasetError(f"{path} holds {dtype} values, not token ids; {_REMAKE}.")
    size = _HEADER.size + 12 * sequences + 8 * (dataset.documents + 1)
    _check_size(path, size, "its header asks for")
    if (last := int(dataset.boundaries[-1])) != sequences:
        raise DatasetError(
            f"{path} ends its documents after {last} sequences but holds {sequences}; {_REMAKE}."
        )
    itemsize = np.dtype(dtype).itemsize
    wanted = int(dataset.pointers[-1]) + itemsize * int(dataset.lengths[-1]) if sequences else 0
    _check_size(dataset.bin_path, wanted, f"{path.name} describes")
    return wanted // itemsize


def _check_size(path: Path, wanted: int, by: str) -> None:
    found = path.stat().st_size
    if found != wanted:
        raise DatasetError(
            f"{path} is {found} bytes where {by} {wanted}; "
            f"it is {'cut short' if found < wanted else 'too long'}, so {_REMAKE}."
        )
