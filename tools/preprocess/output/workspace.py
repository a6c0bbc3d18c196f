"""The folder `P.partial/` that a run works in.

`run.json` says what the run is. `part-000003/` holds one stretch of the input as `KEY.bin` and `KEY.idx`
for each JSON key, and `part.json`; it is written as `part-000003.new/` and renamed when all of it is on
the disk. `joined/` grows beside the parts, is built again from them after a kill, and becomes `whole/`
when it is complete: then only renames are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from tools.preprocess.dataset.files import (
    Dataset,
    IndexHeader,
    TokenType,
    bin_path,
    idx_path,
    open_dataset,
    token_dtype,
    write_index,
)
from tools.preprocess.dataset.manifest import RunIdentity, ShardHash, difference
from tools.preprocess.encode.pipeline import Int32s, Packed
from tools.preprocess.errors import DatasetError, OutputError
from tools.preprocess.output.atomic_io import JOINED, WHOLE, complete, fresh, locked, publish
from tools.preprocess.output.join import JoinedBin, Origin, seal
from tools.records.io import flush_names_to_disk, flush_to_disk, write_record

_UNFINISHED = ".new"
MOST_ENTRIES = 1 << 23
"""Documents and sequences of a part: their numbers are in memory until it is committed."""


@dataclass(frozen=True)
class Position:
    """Where in the input a part ends: byte or row `offset` of a slice."""

    slice_index: int
    offset: int


@dataclass(frozen=True)
class PartRecord:
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
        self.parts: list[PartRecord] = []
        self._joined: dict[str, JoinedBin] = {}
        self._writers: dict[str, _PartWriter] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Work in the folder: start, or resume after the last part.

        Raises:
            OutputError: It belongs to another run, is damaged, or another process works in it.
        """
        with locked(self.folder), ExitStack() as stack:
            self._claim()
            if not self.is_complete:
                self.parts = list(self._read_parts())
                self._join_again(stack)
            try:
                yield
            finally:
                for writer in self._writers.values():
                    writer.close()

    @property
    def is_complete(self) -> bool:
        """Whether only renaming is left to do."""
        return (self.folder / WHOLE).exists()

    @property
    def is_part_full(self) -> bool:
        """Whether the part should be committed, however little input it took."""
        return any(writer.entries >= MOST_ENTRIES for writer in self._writers.values())

    def append(self, packed: Sequence[Packed]) -> None:
        """Add a block, for each key; it does not survive before `commit`."""
        if not self._writers:
            self._start_part()
        for writer, joined, block in zip(
            self._writers.values(), self._joined.values(), packed, strict=True
        ):
            data = memoryview(block.tokens).cast("B")
            writer.append(block, data)
            joined.append(data)

    def commit(self, end: Position, problems: Mapping[str, int], final: bool) -> None:
        """Make everything appended so far survive, as a part."""
        if not self._writers:
            self._start_part()
        outputs = tuple(
            writer.finish(joined.sha256)
            for writer, joined in zip(self._writers.values(), self._joined.values(), strict=True)
        )
        part = PartRecord(end, dict(problems), outputs, final)
        folder = self._part_folder(len(self.parts))
        unfinished = _unfinished(folder)
        write_record(unfinished / "part.json", part, durable=True)
        unfinished.rename(folder)
        flush_names_to_disk(self.folder)
        self.parts.append(part)
        self._writers = {}

    def finish(self, engine: str) -> None:
        """Complete the joined data sets; from here on only renames are left."""
        problems: Counter[str] = Counter()
        for part in self.parts:
            problems.update(part.problems)
        for index, (key, joined) in enumerate(self._joined.items()):
            shards = [part.outputs[index] for part in self.parts]
            datasets = [self._dataset(number, key) for number in range(len(self.parts))]
            origin = Origin(key, engine, problems, self.identity)
            seal(self.folder / JOINED / key, joined, datasets, shards, origin)
        complete(self.folder)

    def publish(self) -> list[Path]:
        """Give everything its final name, and remove the folder; the data sets' prefixes."""
        publish(self.folder, self.prefixes)
        return list(self.prefixes.values())

    def _claim(self) -> None:
        file = self.folder / "run.json"
        if not file.exists():
            write_record(file, self.identity, durable=True)
            return
        if changed := difference(self.identity, _decoded(file, RunIdentity)):
            raise OutputError(
                f"{self.folder} holds an unfinished run that differs: {changed}; "
                "repeat it as it was, or start over with --restart."
            )

    def _read_parts(self) -> Iterator[PartRecord]:
        number = 0
        while (file := self._part_folder(number) / "part.json").exists():
            yield _decoded(file, PartRecord)
            number += 1

    def _join_again(self, stack: ExitStack) -> None:
        """Start the joined files with the parts that are there, checking these on the way."""
        folder = fresh(self.folder / JOINED)
        for index, key in enumerate(self.identity.json_keys):
            joined = stack.enter_context(closing(JoinedBin(bin_path(folder / key))))
            for number, part in enumerate(self.parts):
                joined.append_file(self._dataset(number, key).bin_path)
                if joined.sha256 != part.outputs[index].sha256:
                    raise OutputError(
                        f"Part {number} in {self.folder} is damaged (its sha256 has changed); "
                        "start over with --restart."
                    )
            self._joined[key] = joined

    def _start_part(self) -> None:
        folder = fresh(_unfinished(self._part_folder(len(self.parts))))
        self._writers = {key: _PartWriter(folder / key, self.dtype) for key in self._joined}

    def _part_folder(self, number: int) -> Path:
        return self.folder / f"part-{number:06}"

    def _dataset(self, number: int, key: str) -> Dataset:
        try:
            return open_dataset(self._part_folder(number) / key)
        except DatasetError as error:
            raise OutputError(f"{error} Or start over with --restart.") from None


class _PartWriter:
    """One key's `.bin` and `.idx` in an unfinished part."""

    def __init__(self, prefix: Path, dtype: TokenType) -> None:
        self._prefix = prefix
        self._dtype = dtype
        self._stream = bin_path(prefix).open("wb")
        self._lengths: list[Int32s] = []
        self._counts: list[Int32s] = []
        self._tokens = self._text_bytes = 0
        self.entries = 0

    def append(self, block: Packed, data: memoryview) -> None:
        """Add a block, of which `data` are the tokens."""
        self._stream.write(data)
        self._lengths.append(block.lengths)
        self._counts.append(block.counts)
        self.entries += len(block.counts) + len(block.lengths)
        self._tokens += len(block.tokens)
        self._text_bytes += block.text_bytes

    def finish(self, sha256: str) -> ShardHash:
        """Write the index and have both files on the disk; `sha256` is for the record."""
        flush_to_disk(self._stream)
        self._stream.close()
        documents = sum(map(len, self._counts))
        sequences = sum(map(len, self._lengths))
        header = IndexHeader(self._dtype.name, sequences, documents)
        with idx_path(self._prefix).open("wb") as stream:
            counts = np.concatenate([np.empty(0, np.int32), *self._counts])
            boundaries = np.cumsum(counts, dtype=np.int64)
            write_index(stream, header, lambda: self._lengths, [boundaries])
            flush_to_disk(stream)
        return ShardHash(documents, sequences, self._tokens, self._text_bytes, sha256)

    def close(self) -> None:
        """Leave the part unfinished."""
        with suppress(OSError):  # a full disk, reported already
            self._stream.close()


def _decoded[Record](file: Path, kind: type[Record]) -> Record:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.MsgspecError:
        raise OutputError(f"{file} is damaged; start over with --restart.") from None


def output_prefix(prefix: Path, key: str) -> Path:
    """Prefix of the data set that a JSON key becomes."""
    return prefix.with_name(f"{prefix.name}_{key}_document")


def _unfinished(part: Path) -> Path:
    return part.with_name(part.name + _UNFINISHED)
