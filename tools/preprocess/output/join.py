"""Data sets joined in order, in bounded memory: the parts of a run, or whole ones (`merge`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tools.preprocess.dataset.files import Dataset, bin_path, idx_path
from tools.preprocess.dataset.index import IndexHeader, IntArray, write_index
from tools.preprocess.dataset.manifest import Manifest, RunIdentity, ShardHash, manifest_path
from tools.records.io import flush_to_disk, write_record

Buffer = bytes | memoryview
_PIECE_BYTES = 4 << 20


class JoinedBin:
    """A `.bin` that grows, hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._sha256 = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of all that was appended so far."""
        return self._sha256.hexdigest()

    def append(self, data: Buffer) -> None:
        """Add some tokens."""
        self._sha256.update(data)
        self._stream.write(data)

    def append_file(self, path: Path) -> str:
        """Add another `.bin`; its own sha256."""
        own = hashlib.sha256()
        with path.open("rb") as source:
            while piece := source.read(_PIECE_BYTES):
                own.update(piece)
                self.append(piece)
        return own.hexdigest()

    def flush(self) -> None:
        """Have it on the disk."""
        flush_to_disk(self._stream)

    def __enter__(self) -> JoinedBin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # a full disk, reported already
            self._stream.close()


@dataclass(frozen=True)
class Origin:
    """What a manifest says of a data set beside counts and hashes."""

    json_key: str
    engine: str
    problems: Mapping[str, int]
    identity: RunIdentity


def seal(
    prefix: Path,
    joined: JoinedBin,
    datasets: Sequence[Dataset],
    shards: Sequence[ShardHash],
    origin: Origin | None,
) -> None:
    """Complete the joined `.bin` at `prefix` with its index and manifest, all on the disk.

    Args:
        prefix: Path without suffix.
        joined: The tokens, all of them.
        datasets: Where they came from, in order; at least one.
        shards: The same for the manifest.
        origin: Without it there is no manifest.
    """
    joined.flush()
    header = IndexHeader(
        dtype=datasets[0].dtype,
        sequences=sum(dataset.sequences for dataset in datasets),
        documents=sum(dataset.documents for dataset in datasets),
    )
    with idx_path(prefix).open("wb+") as stream:
        write_index(stream, header, lambda: _lengths(datasets), _boundaries(datasets))
        flush_to_disk(stream)
        stream.seek(0)
        index_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if origin is None:
        return
    manifest = Manifest(
        json_key=origin.json_key,
        documents=header.documents,
        sequences=header.sequences,
        tokens=sum(dataset.tokens for dataset in datasets),
        dtype=header.dtype,
        text_bytes=sum(shard.text_bytes for shard in shards),
        bin_bytes=bin_path(prefix).stat().st_size,
        idx_bytes=header.size_bytes,
        bin_sha256=joined.sha256,
        idx_sha256=index_sha256,
        engine=origin.engine,
        problems=dict(origin.problems),
        identity=origin.identity,
        shards=tuple(shards),
    )
    write_record(manifest_path(prefix), manifest, durable=True)


def _lengths(datasets: Sequence[Dataset]) -> Iterator[IntArray]:
    for dataset in datasets:
        yield from dataset.lengths()


def _boundaries(datasets: Sequence[Dataset]) -> Iterator[IntArray]:
    """All boundaries but the first of each: that is the last one of the data set before it."""
    before = 0
    for dataset in datasets:
        skip = 1
        for chunk in dataset.boundaries():
            yield before + chunk[skip:]
            skip = 0
        before += dataset.sequences
