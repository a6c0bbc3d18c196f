"""Write, read and join the numbered parts of an unfinished run.

A part is a stretch of the input, and is on the disk completely or not at all. `part-000003/` holds a data set per
JSON key, with its manifest, and `part.json` with the position at which the part ends.
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
    """Return the end positions of the parts that earlier processes left in a run's folder."""
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
    """Write all blocks into new parts of a run, and append the end position of each part to `parts`.

    A part is a folder with a data set per JSON key. It appears on the disk only when it is complete.

    Args:
        folder: Folder of the run.
        parts: End positions of the parts that exist. The list is changed in place.
        blocks: Encoded blocks, each with the position at which it ends.
        identity: Identity of the run.
        engine: Name of the encoder, for the manifests.
    """
    identity = replace(identity, inputs=())  # Thousands of inputs would make every manifest large.
    while not (parts and parts[-1].final):
        with atomic_directory(_part_folder(folder, len(parts)), durable=True) as unfinished:
            end = _write_part(unfinished, blocks, identity, engine)
            write_record(unfinished / "part.json", end, durable=True)
        parts.append(end)


def _write_part(
    folder: Path, blocks: Iterator[tuple[Position, Encoded]], identity: RunIdentity, engine: str
) -> Position:
    """Write blocks until the part is full or no blocks are left. Return the position at which the part ends."""
    end, size = START, 0
    problems: Counter[str] = Counter()
    with ExitStack() as stack:
        outputs = [_Output(folder / key, identity, stack) for key in identity.json_keys]
        while size < identity.shard_bytes:
            located_block = next(blocks, None)
            if located_block is None:
                end = replace(end, final=True)
                break
            end, encoded = located_block
            for output, packed in zip(outputs, encoded.packed, strict=True):
                output.append(packed)
            problems.update(problem.kind for _, problem in encoded.problems)
            size += encoded.block.size_bytes
        for key, output in zip(identity.json_keys, outputs, strict=True):
            write_manifest(folder / key, key, engine, problems, identity, [output.finish()])
    return end


class _Output:
    """Data set of one JSON key while it grows. Its tokens go to the `.bin`, and `finish` writes the `.idx`."""

    def __init__(self, prefix: Path, identity: RunIdentity, stack: ExitStack) -> None:
        self._prefix = prefix
        self._dtype = token_dtype(identity.vocabulary).name
        self._stream = stack.enter_context(bin_path(prefix).open("wb"))
        self._sha256 = hashlib.sha256()
        self._pieces: list[DocumentIndex] = []
        self._text_bytes = 0

    def append(self, block: Packed) -> None:
        """Append the tokens and documents of a block."""
        self._sha256.update(block.tokens)
        self._stream.write(block.tokens.data)
        self._pieces.append(block.index)
        self._text_bytes += block.text_bytes

    def finish(self) -> ShardHash:
        """Write both files to the disk; return their tokens, bytes of text and hash."""
        flush_to_disk(self._stream)
        write_index(idx_path(self._prefix), self._dtype, lambda: self._pieces)
        tokens = open_dataset(self._prefix).tokens
        return ShardHash(tokens, self._text_bytes, self._sha256.hexdigest())


def join_parts(folder: Path, count: int, identity: RunIdentity) -> None:
    """Join the first `count` parts of a run into one data set per JSON key, in the folder of the run.

    Raises:
        DatasetError: A part is damaged.
    """
    for key in identity.json_keys:
        try:
            parts = [open_dataset(_part_folder(folder, n) / key) for n in range(count)]
            join_datasets(parts, folder / key, identity)
        except DatasetError as error:
            raise DatasetError(f"{error} Or start over with --restart.") from None


def decoded[Record](file: Path, kind: type[Record]) -> Record:
    """Read a record of type `kind` from a JSON file that an earlier process wrote.

    Raises:
        DatasetError: The file is damaged.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.MsgspecError:
        raise DatasetError(f"{file} is damaged; start over with --restart.") from None


def _part_folder(folder: Path, number: int) -> Path:
    """Return the folder of a part."""
    return folder / f"part-{number:06}"
