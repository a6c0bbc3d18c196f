"""The folder `P.partial/` a run works in: what is committed survives a kill at any moment.

`run.json` says what the run is, `journal.jsonl` has a line for each committed shard, and for each
JSON key there are `KEY.bin`, `KEY.lengths` and `KEY.counts`. Bytes beyond the journal's last line
are cut off on resuming. When all is done, index and manifest are added, then the mark `complete`;
from then on files are only renamed to their final names, the `.idx` last: Megatron takes no data
set without one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from tools.preprocess.dataset import bin_path, idx_path
from tools.preprocess.durable import lock, move, sync, sync_folder, write_whole
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
from tools.preprocess.output import Output
from tools.preprocess.pack import Packed


@dataclass(frozen=True)
class Position:
    """Where in the input a shard ends: byte or row `offset` of a slice."""

    slice_index: int
    offset: int


@dataclass(frozen=True)
class Shard:
    """A journal line: what is on disk, and where in the input the next shard starts."""

    end: Position
    input_bytes: int
    """Text read for this shard."""
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
        self._outputs: list[Output] = []
        self._lock: BinaryIO | None = None

    def open(self) -> None:
        """Start, or go on from the last commit.

        Raises:
            OutputError: The folder belongs to another run, or another process works in it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.folder)
        self._claim()
        if self.is_complete:
            return
        self.shards = self._read_journal()
        for index, key in enumerate(self.identity.json_keys):
            done = [shard.outputs[index] for shard in self.shards]
            self._outputs.append(Output(self.folder / key, self.dtype, done))

    @property
    def is_complete(self) -> bool:
        """Whether only renaming is left to do."""
        return (self.folder / "complete").exists()

    def append(self, packed: Sequence[Packed]) -> None:
        """Add a block, for each key; not on disk for certain before `commit`."""
        for output, block in zip(self._outputs, packed, strict=True):
            output.append(block)

    def commit(
        self, end: Position, input_bytes: int, problems: dict[str, int], final: bool
    ) -> None:
        """Make everything appended so far survive."""
        hashes = tuple(output.sync() for output in self._outputs)
        shard = Shard(end, input_bytes, problems, hashes, final)
        with (self.folder / "journal.jsonl").open("ab") as journal:
            journal.write(msgspec.json.encode(shard) + b"\n")
            sync(journal)
        self.shards.append(shard)

    def finish(self, engine: str) -> None:
        """Write indices and manifests, then the mark that all is whole."""
        for output, key in zip(self._outputs, self.identity.json_keys, strict=True):
            output.close()
            index = self.folder / f"{key}.idx"
            with index.open("wb") as stream:
                lengths, counts = self.folder / f"{key}.lengths", self.folder / f"{key}.counts"
                write_index(stream, self.dtype, lengths, counts)
                sync(stream)
            manifest = self._manifest(key, output, index, engine)
            write_whole(self.folder / f"{key}.manifest", encode_record(manifest))
        write_whole(self.folder / "complete", b"")

    def publish(self) -> list[Path]:
        """Rename everything to its final name (again after a kill); the data sets' prefixes."""
        prefixes = [output_prefix(self.prefix, key) for key in self.identity.json_keys]
        for key, prefix in zip(self.identity.json_keys, prefixes, strict=True):
            if (self.folder / f"{key}.idx").exists():
                idx_path(prefix).unlink(missing_ok=True)
                sync_folder(prefix.parent)
            move(self.folder / f"{key}.manifest", manifest_path(prefix))
            move(self.folder / f"{key}.bin", bin_path(prefix))
            sync_folder(prefix.parent)
            move(self.folder / f"{key}.idx", idx_path(prefix))
        sync_folder(self.prefix.parent)
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
            write_whole(file, encode_record(self.identity))
            return
        try:
            theirs = msgspec.json.decode(file.read_bytes(), type=RunIdentity)
        except msgspec.MsgspecError:
            raise OutputError(
                f"{file} is damaged; remove the folder {self.folder} to start over."
            ) from None
        changed = difference(self.identity, theirs)
        if changed is not None:
            raise OutputError(
                f"{self.folder} holds an unfinished run that differs: {changed}; "
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

    def _manifest(self, key: str, output: Output, index: Path, engine: str) -> Manifest:
        problems: Counter[str] = Counter()
        for shard in self.shards:
            problems.update(shard.problems)
        with index.open("rb") as stream:
            index_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        tokens = sum(shard.tokens for shard in output.done)
        return Manifest(
            json_key=key,
            documents=sum(shard.documents for shard in output.done),
            sequences=sum(shard.sequences for shard in output.done),
            tokens=tokens,
            dtype=self.dtype.name,
            text_bytes=sum(shard.text_bytes for shard in output.done),
            bin_bytes=tokens * self.dtype.itemsize,
            idx_bytes=index.stat().st_size,
            bin_sha256=output.sha256,
            idx_sha256=index_sha256,
            engine=engine,
            problems=dict(problems),
            identity=self.identity,
            shards=tuple(output.done),
        )


def output_prefix(prefix: Path, key: str) -> Path:
    """Prefix of the data set that a JSON key becomes."""
    return prefix.with_name(f"{prefix.name}_{key}_document")
