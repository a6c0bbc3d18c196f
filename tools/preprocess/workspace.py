"""The folder `P.partial/` a run works in: what is committed survives a kill at any moment.

`run.json` says what the run is, `journal.jsonl` has a line for each committed shard, and for each
JSON key there are `KEY.bin`, `KEY.lengths` and `KEY.counts`. Bytes beyond the journal's last line
are cut off on resuming. When all is done, index and manifest are added, then the mark `complete`;
from then on files are only renamed to their final names, the `.idx` last: Megatron takes no data
set without one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from tools.preprocess.dataset import bin_path, idx_path
from tools.preprocess.errors import OutputError
from tools.preprocess.index import TokenType, token_dtype, write_index
from tools.preprocess.manifest import (
    Manifest,
    RunIdentity,
    ShardHash,
    difference,
    encode_record,
    manifest_path,
)
from tools.preprocess.pack import Packed

_COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Shard:
    """A journal line: what is on disk, and where in the input the next shard starts."""

    slice_index: int
    offset: int
    input_bytes: int
    """Text of this shard."""
    problems: dict[str, int]
    outputs: tuple[ShardHash, ...]
    """One for each JSON key."""
    final: bool = False


class Workspace:
    """Appends blocks, commits shards, publishes the data sets."""

    def __init__(self, prefix: Path, identity: RunIdentity) -> None:
        self.prefix = prefix
        self.identity = identity
        self.folder = prefix.with_name(prefix.name + ".partial")
        self.dtype: TokenType = token_dtype(identity.vocabulary)
        self.shards: list[Shard] = []
        self._outputs: list[_Output] = []
        self._lock: BinaryIO | None = None

    def open(self) -> None:
        """Start, or go on from the last commit.

        Raises:
            OutputError: The folder belongs to another run, or another process works in it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        self._claim()
        self.shards = self._read_journal()
        for index, key in enumerate(self.identity.json_keys):
            done = [shard.outputs[index] for shard in self.shards]
            self._outputs.append(_Output(self.folder / key, self.dtype, done))

    @property
    def is_complete(self) -> bool:
        """Whether only renaming is left to do."""
        return (self.folder / "complete").exists()

    def append(self, packed: Sequence[Packed]) -> None:
        """Add a block, for each key; not on disk for certain before `commit`."""
        for output, block in zip(self._outputs, packed, strict=True):
            output.append(block)

    def commit(
        self, slice_index: int, offset: int, input_bytes: int, problems: dict[str, int], final: bool
    ) -> None:
        """Make everything appended so far survive."""
        hashes = tuple(output.sync() for output in self._outputs)
        shard = Shard(slice_index, offset, input_bytes, problems, hashes, final)
        with (self.folder / "journal.jsonl").open("ab") as journal:
            journal.write(msgspec.json.encode(shard) + b"\n")
            _sync(journal)
        self.shards.append(shard)

    def finish(self, engine: str) -> None:
        """Write indices and manifests, then the mark that all is whole."""
        for output, key in zip(self._outputs, self.identity.json_keys, strict=True):
            output.close()
            self._write_index(key)
            self._write_manifest(key, output, engine)
        _sync_folder(self.folder)
        (self.folder / "complete").touch()
        _sync_folder(self.folder)

    def publish(self) -> list[Path]:
        """Rename everything to its final name (again after a kill); the data sets' prefixes."""
        prefixes = [output_prefix(self.prefix, key) for key in self.identity.json_keys]
        for key, prefix in zip(self.identity.json_keys, prefixes, strict=True):
            if (self.folder / f"{key}.idx").exists():
                idx_path(prefix).unlink(missing_ok=True)
            _move(self.folder / f"{key}.manifest", manifest_path(prefix))
            _move(self.folder / f"{key}.bin", bin_path(prefix))
            _sync_folder(prefix.parent)
            _move(self.folder / f"{key}.idx", idx_path(prefix))
        _sync_folder(self.prefix.parent)
        self.close()
        shutil.rmtree(self.folder)
        return prefixes

    def close(self) -> None:
        """Let go of all files; what is not committed is cut off next time."""
        for output in self._outputs:
            output.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _claim(self) -> None:
        file = self.folder / "run.json"
        if not file.exists():
            partial = file.with_suffix(".new")
            with partial.open("wb") as stream:
                stream.write(encode_record(self.identity))
                _sync(stream)
            partial.replace(file)
            _sync_folder(self.folder)
            return
        try:
            theirs = msgspec.json.decode(file.read_bytes(), type=RunIdentity)
        except msgspec.MsgspecError:
            raise OutputError(f"{file} is damaged; remove the folder {self.folder}.") from None
        changed = difference(self.identity, theirs)
        if changed is not None:
            raise OutputError(
                f"{self.folder} holds an unfinished run whose setting differs: {changed}; "
                "repeat it as it was, or start over with --restart."
            )

    def _read_journal(self) -> list[Shard]:
        file = self.folder / "journal.jsonl"
        if not file.exists():
            return []
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # killed while writing the last line
            os.truncate(file, len(whole))
        return msgspec.json.Decoder(Shard).decode_lines(whole)

    def _write_index(self, key: str) -> None:
        with (self.folder / f"{key}.idx").open("wb") as stream:
            lengths, counts = self.folder / f"{key}.lengths", self.folder / f"{key}.counts"
            write_index(stream, self.dtype, lengths, counts)
            _sync(stream)

    def _write_manifest(self, key: str, output: _Output, engine: str) -> None:
        index = self.folder / f"{key}.idx"
        problems: dict[str, int] = {}
        for shard in self.shards:
            for kind, count in shard.problems.items():
                problems[kind] = problems.get(kind, 0) + count
        with index.open("rb") as stream:
            index_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        manifest = Manifest(
            json_key=key,
            documents=sum(done.documents for done in output.done),
            sequences=sum(done.sequences for done in output.done),
            tokens=sum(done.tokens for done in output.done),
            dtype=self.dtype.name,
            bin_bytes=sum(done.tokens for done in output.done) * self.dtype.itemsize,
            idx_bytes=index.stat().st_size,
            bin_sha256=output.sha256,
            idx_sha256=index_sha256,
            input_bytes=sum(shard.input_bytes for shard in self.shards),
            engine=engine,
            problems=problems,
            identity=self.identity,
            shards=tuple(output.done),
        )
        with (self.folder / f"{key}.manifest").open("wb") as stream:
            stream.write(encode_record(manifest))
            _sync(stream)


def output_prefix(prefix: Path, key: str) -> Path:
    """Prefix of the data set that a JSON key becomes."""
    return prefix.with_name(f"{prefix.name}_{key}_document")


class _Output:
    """The three growing files of one JSON key."""

    def __init__(self, base: Path, dtype: TokenType, done: list[ShardHash]) -> None:
        self.done = done
        self._itemsize = dtype.itemsize
        self._total = hashlib.sha256()
        self._documents = self._sequences = self._tokens = 0
        self._files = [
            _open_at(base.with_name(base.name + suffix), size)
            for suffix, size in (
                (".bin", sum(d.tokens for d in done) * dtype.itemsize),
                (".lengths", sum(d.sequences for d in done) * 4),
                (".counts", sum(d.documents for d in done) * 4),
            )
        ]
        self._rehash(base.with_name(base.name + ".bin"))

    @property
    def sha256(self) -> str:
        """Of the whole `.bin`."""
        return self._total.hexdigest()

    def append(self, block: Packed) -> None:
        data = memoryview(block.tokens).cast("B")
        self._total.update(data)
        arrays = (data, block.lengths.data, block.counts.data)
        for file, array in zip(self._files, arrays, strict=True):
            file.write(array)
        self._documents += len(block.counts)
        self._sequences += len(block.lengths)
        self._tokens += len(block.tokens)

    def sync(self) -> ShardHash:
        for file in self._files:
            _sync(file)
        shard = ShardHash(self._documents, self._sequences, self._tokens, self._total.hexdigest())
        self.done.append(shard)
        self._documents = self._sequences = self._tokens = 0
        return shard

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _rehash(self, path: Path) -> None:
        """Hash what earlier runs committed, and check it on the way."""
        with path.open("rb") as stream:
            for number, shard in enumerate(self.done):
                for piece in _pieces(stream, shard.tokens * self._itemsize):
                    self._total.update(piece)
                if self._total.hexdigest() != shard.sha256:
                    raise OutputError(
                        f"Shard {number} in {path} is damaged (its sha256 is not the journal's); "
                        "start over with --restart."
                    )


def _pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (piece := stream.read(min(size, _COPY_BYTES))):
        size -= len(piece)
        yield piece


def _open_at(path: Path, size: int) -> BinaryIO:
    """Open for appending at `size`, cutting off what lies beyond."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    stream = os.fdopen(descriptor, "r+b")
    if os.fstat(descriptor).st_size < size:
        stream.close()
        raise OutputError(f"{path} is shorter than its journal says; start over with --restart.")
    stream.truncate(size)
    stream.seek(size)
    return stream


def _lock(folder: Path) -> BinaryIO:
    stream = (folder / "lock").open("wb")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        raise OutputError(
            f"Another process is writing in {folder}; wait for it, or stop it."
        ) from None
    return stream


def _move(source: Path, target: Path) -> None:
    if source.exists():
        source.replace(target)


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
