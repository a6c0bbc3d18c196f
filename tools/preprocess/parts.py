"""The numbered parts of an unfinished run: stretches of the input, each there whole or not at all.

`part-000003/` holds a data set for each JSON key, with its manifest, and `part.json`: where it ends.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from parakit.artifacts.io import atomic_directory, flush_to_disk, write_record
from parakit.data import (
    DatasetError,
    DocumentIndex,
    RunIdentity,
    ShardHash,
    bin_path,
    idx_path,
    join_datasets,
    open_dataset,
    token_dtype,
    write_index,
    write_manifest,
)
from tools.preprocess.pipeline import Encoded, Packed
from tools.preprocess.source import START, Position


def read_parts(folder: Path) -> list[Position]:
    """Where the parts end that earlier processes have left in the folder of a run."""
    parts: list[Position] = []
    while (file := _part_folder(folder, len(parts)) / "part.json").exists():
        parts.append(decoded(file, Position))
    return parts


def write_parts(
    folder: Path,
    parts: list[Position],
    blocks: Iterator[tuple[Position, Encoded]],
    identity: RunIdentity,
    engine: str,
) -> None:
    """Write the next blocks, each with the place where it ends, and append their parts' ends."""
    identity = replace(identity, inputs=())  # of which there may be thousands
    while not (parts and parts[-1].final):
        with atomic_directory(_part_folder(folder, len(parts)), durable=True) as unfinished:
            end = _write_part(unfinished, blocks, identity, engine)
            write_record(unfinished / "part.json", end, durable=True)
        parts.append(end)


def _write_part(
    folder: Path, blocks: Iterator[tuple[Position, Encoded]], identity: RunIdentity, engine: str
) -> Position:
    """Write blocks until the part is full or there are no more of them; where it ends."""
    end, size = START, 0
    problems: Counter[str] = Counter()
    with ExitStack() as stack:
        outputs = [_Output(folder / key, identity, stack) for key in identity.json_keys]
        while size < identity.shard_bytes and not end.final:
            end, encoded = next(blocks, (replace(end, final=True), None))
            if encoded is not None:
                for output, packed in zip(outputs, encoded.packed, strict=True):
                    output.append(packed)
                problems.update(problem.kind for _, problem in encoded.problems)
                size += encoded.block.size_bytes
        for key, output in zip(identity.json_keys, outputs, strict=True):
            write_manifest(folder / key, key, engine, problems, identity, [output.finish()])
    return end


class _Output:
    """A key's `.bin` as it grows; its `.idx` follows when it is complete."""

    def __init__(self, prefix: Path, identity: RunIdentity, stack: ExitStack) -> None:
        self._prefix = prefix
        self._dtype = token_dtype(identity.vocabulary).name
        self._stream = stack.enter_context(bin_path(prefix).open("wb"))
        self._sha256 = hashlib.sha256()
        self._pieces: list[DocumentIndex] = []
        self._text_bytes = 0

    def append(self, block: Packed) -> None:
        """Add a block."""
        self._sha256.update(block.tokens)
        self._stream.write(block.tokens.data)
        self._pieces.append(block.index)
        self._text_bytes += block.text_bytes

    def finish(self) -> ShardHash:
        """Have both files on the disk; what they hold."""
        flush_to_disk(self._stream)
        write_index(idx_path(self._prefix), self._dtype, lambda: self._pieces)
        tokens = open_dataset(self._prefix).tokens
        return ShardHash(tokens, self._text_bytes, self._sha256.hexdigest())


def join_parts(folder: Path, count: int, identity: RunIdentity) -> None:
    """Make the data sets of all parts, in the run's folder."""
    for key in identity.json_keys:
        try:
            parts = [open_dataset(_part_folder(folder, n) / key) for n in range(count)]
            join_datasets(parts, folder / key, identity)
        except DatasetError as error:
            raise DatasetError(f"{error} Or start over with --restart.") from None


def decoded[Record](file: Path, kind: type[Record]) -> Record:
    """A record that an earlier process wrote."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.MsgspecError:
        raise DatasetError(f"{file} is damaged; start over with --restart.") from None


def _part_folder(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06}"
