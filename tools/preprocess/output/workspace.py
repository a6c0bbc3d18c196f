"""The folder `P.partial/` that a run works in.

`run.json` says what the run is. In `joined/` the tokens of each JSON key grow as `KEY.bin`. Each
stretch of the input that is safe on the disk is a part: `part-000003/` holds its `KEY.idx` and
`part.json`, written as `part-000003.new/` and renamed when they and its tokens are on the disk. What a
`.bin` holds beyond the last part is cut off after a kill. When all is there, `joined/` becomes `whole/`:
then only renames are left.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from tools.preprocess.dataset.files import (
    Index,
    TokenType,
    bin_path,
    idx_path,
    open_dataset,
    read_index,
    token_dtype,
    write_index,
)
from tools.preprocess.dataset.manifest import RunIdentity, ShardHash, difference
from tools.preprocess.encode.pipeline import Encoded, Int32s, Packed
from tools.preprocess.errors import DatasetError, OutputError
from tools.preprocess.input.files import Position
from tools.preprocess.output.folder import JOINED, WHOLE, complete, fresh, locked, publish
from tools.preprocess.output.join import join_indexes, write_manifest
from tools.records.io import flush_names_to_disk, flush_to_disk, write_record

MOST_ENTRIES = 1 << 23
"""Documents and sequences of a part: their numbers are in memory until it is committed."""
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Part:
    """`part.json`: what the part holds, and where in the input the next one starts."""

    end: Position
    problems: dict[str, int]
    outputs: tuple[ShardHash, ...]
    """One for each JSON key."""
    final: bool
    """Whether the input ends here."""


class Workspace:
    """Appends blocks, commits parts, publishes the data sets."""

    def __init__(self, prefix: Path, identity: RunIdentity) -> None:
        self.identity = identity
        self.folder = prefix.with_name(prefix.name + ".partial")
        self.prefixes = {key: output_prefix(prefix, key) for key in identity.json_keys}
        self.dtype: TokenType = token_dtype(identity.vocabulary)
        self.parts: list[Part] = []
        self._outputs: dict[str, _Output] = {}
        self._end = Position(0, 0)
        self._problems: Counter[str] = Counter()
        self._size_bytes = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Work in the folder: start, or resume after the last part.

        Raises:
            OutputError: It belongs to another run, is damaged, or another process works in it.
        """
        with locked(self.folder), ExitStack() as stack:
            self._claim()
            if not self.is_complete:
                self._read_parts()
                (self.folder / JOINED).mkdir(exist_ok=True)
                for number, key in enumerate(self.identity.json_keys):
                    path = bin_path(self.folder / JOINED / key)
                    output = _Output(stack.enter_context(path.open("a+b")), self.dtype)
                    self._keep_parts(output, number)
                    self._outputs[key] = output
            yield

    @property
    def is_complete(self) -> bool:
        """Whether only renaming is left to do."""
        return (self.folder / WHOLE).exists()

    @property
    def has_all_input(self) -> bool:
        """Whether the parts reach to the input's end."""
        return bool(self.parts) and self.parts[-1].final

    def append(self, encoded: Encoded) -> None:
        """Add a block; when a part is full it is committed, and survives from then on."""
        for output, packed in zip(self._outputs.values(), encoded.packed, strict=True):
            output.append(packed)
        self._end = encoded.block.end
        self._problems.update(problem.kind for problem in encoded.problems)
        self._size_bytes += encoded.block.size_bytes
        entries = max(output.entries for output in self._outputs.values())
        if self._size_bytes >= self.identity.shard_bytes or entries >= MOST_ENTRIES:
            self.commit(final=False)

    def commit(self, final: bool) -> None:
        """Make everything appended so far survive, as a part."""
        folder = self._part_folder(len(self.parts))
        unfinished = fresh(folder.with_name(folder.name + ".new"))
        outputs = [out.commit(idx_path(unfinished / key)) for key, out in self._outputs.items()]
        part = Part(self._end, dict(self._problems), tuple(outputs), final)
        write_record(unfinished / "part.json", part, durable=True)
        unfinished.rename(folder)
        flush_names_to_disk(self.folder)
        self.parts.append(part)
        self._problems.clear()
        self._size_bytes = 0

    def finish(self, engine: str) -> None:
        """Complete the data sets; from here on only renames are left."""
        problems: Counter[str] = Counter()
        for part in self.parts:
            problems.update(part.problems)
        folders = [self._part_folder(number) for number in range(len(self.parts))]
        for number, key in enumerate(self.identity.json_keys):
            prefix = self.folder / JOINED / key
            shards = [part.outputs[number] for part in self.parts]
            try:
                join_indexes([read_index(idx_path(folder / key)) for folder in folders], prefix)
                write_manifest(prefix, shards, key, engine, problems, self.identity)
                open_dataset(prefix)  # all of it fits together
            except DatasetError as error:
                raise OutputError(f"{error} Or start over with --restart.") from None
        complete(self.folder)

    def publish(self) -> Sequence[Path]:
        """Give everything its final name, and remove the folder; the data sets' prefixes."""
        publish(self.folder, self.prefixes)
        return list(self.prefixes.values())

    def _claim(self) -> None:
        file = self.folder / "run.json"
        if not file.exists():
            write_record(file, self.identity, durable=True)
        elif changed := difference(self.identity, _decoded(file, RunIdentity)):
            raise OutputError(
                f"{self.folder} holds an unfinished run that differs: {changed}; "
                "repeat it as it was, or start over with --restart."
            )

    def _read_parts(self) -> None:
        while (file := self._part_folder(len(self.parts)) / "part.json").exists():
            self.parts.append(_decoded(file, Part))
            self._end = self.parts[-1].end

    def _keep_parts(self, output: _Output, key: int) -> None:
        """Keep a key's tokens of all parts, checking these, and cut off the rest."""
        for number, part in enumerate(self.parts):
            output.keep(part.outputs[key].tokens)
            if output.sha256 != part.outputs[key].sha256:
                raise OutputError(
                    f"Part {number} in {self.folder} is damaged (its sha256 has changed); "
                    "start over with --restart."
                )
        output.cut()

    def _part_folder(self, number: int) -> Path:
        return self.folder / f"part-{number:06}"


class _Output:
    """One key's `.bin` as it grows, and the numbers of the part that is not yet committed."""

    def __init__(self, stream: BinaryIO, dtype: TokenType) -> None:
        self._stream = stream
        self._dtype = dtype
        self._sha256 = hashlib.sha256()
        self._stream.seek(0)
        self._start_part()

    def _start_part(self) -> None:
        self._lengths: list[Int32s] = []
        self._counts: list[Int32s] = []
        self._text_bytes = 0
        self.entries = 0

    @property
    def sha256(self) -> str:
        """Of all tokens so far."""
        return self._sha256.hexdigest()

    def keep(self, tokens: int) -> None:
        """Take over tokens that an earlier process wrote."""
        size = tokens * self._dtype.itemsize
        while size > 0 and (piece := self._stream.read(min(size, _PIECE_BYTES))):
            self._sha256.update(piece)
            size -= len(piece)

    def cut(self) -> None:
        """Drop what stands behind the tokens so far."""
        self._stream.truncate()

    def append(self, block: Packed) -> None:
        """Add a block."""
        data = memoryview(block.tokens).cast("B")
        self._sha256.update(data)
        self._stream.write(data)
        self._lengths.append(block.lengths)
        self._counts.append(block.counts)
        self._text_bytes += block.text_bytes
        self.entries += len(block.counts) + len(block.lengths)

    def commit(self, path: Path) -> ShardHash:
        """Have the part's tokens on the disk, and its index at `path`."""
        flush_to_disk(self._stream)
        lengths, counts = (
            np.concatenate([np.empty(0, np.int32), *chunks])
            for chunks in (self._lengths, self._counts)
        )
        index = Index(path, self._dtype.name, len(lengths), len(counts))
        write_index(index, lambda: [lengths], [np.cumsum(counts, dtype=np.int64)])
        tokens = int(lengths.sum(dtype=np.int64))
        shard = ShardHash(len(counts), len(lengths), tokens, self._text_bytes, self.sha256)
        self._start_part()
        return shard


def output_prefix(prefix: Path, key: str) -> Path:
    """Prefix of the data set that a JSON key becomes."""
    return prefix.with_name(f"{prefix.name}_{key}_document")


def _decoded[Record](file: Path, kind: type[Record]) -> Record:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.MsgspecError:
        raise OutputError(f"{file} is damaged; start over with --restart.") from None
