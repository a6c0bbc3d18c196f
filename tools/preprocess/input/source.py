"""All inputs of a run, or its `--shard`, as one stream of blocks that can be entered anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from tools.preprocess.dataset.manifest import InputIdentity
from tools.preprocess.errors import InputError
from tools.preprocess.input.documents import (
    Documents,
    LineParser,
    Problem,
    ProblemKind,
    Text,
    parse_rows,
    refuse_large,
)
from tools.preprocess.input.files import (
    Block,
    Blocks,
    Format,
    Position,
    Slice,
    check_keys,
    expand,
    identify,
    whole_file,
)
from tools.preprocess.input.hub import PREFIX as HUB_PREFIX
from tools.preprocess.input.hub import Hub
from tools.preprocess.input.lines import line_blocks, lines_before, next_line_start


@dataclass(frozen=True)
class InputShard:
    """One of `count` parts; `index` counts from 0."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE_INPUT = InputShard()


def parse_shard(text: str) -> InputShard:
    """Parse `i/n`, or `slurm`: the task of a job array.

    Raises:
        InputError: Not of that form, or i is not below n.
    """
    if text == "slurm":
        return _slurm_shard()
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise InputError(f"--shard {text} is not of the form i/n, such as 0/4; or give 'slurm'.")
    if int(index) >= int(count):
        raise InputError(
            f"--shard {text} does not exist: parts count from 0, so the last of {count} is "
            f"{max(int(count) - 1, 0)}/{count}."
        )
    return InputShard(int(index), int(count))


def cut(files: Sequence[Slice], shard: InputShard) -> tuple[Slice, ...]:
    """Slices of one part: plain files cut at lines, parquet at row groups, archives not at all."""
    if shard.count == 1:
        return tuple(files)
    total = sum(file.size_bytes for file in files)
    low, high = total * shard.index // shard.count, total * (shard.index + 1) // shard.count
    slices: list[Slice] = []
    start = 0
    for file in files:
        slices += _cut_file(file, low - start, high - start)
        start += file.size_bytes
    return tuple(slices)


def _cut_file(file: Slice, low: int, high: int) -> Iterator[Slice]:
    """What of a file lies in a window of stored bytes, counted from the file's start."""
    size = file.size_bytes
    if file.format is Format.LINES and size:
        path = Path(file.name)
        start, stop = (next_line_start(path, min(max(x, 0), size)) for x in (low, high))
        if start < stop:
            yield Slice(file.name, file.format, start, stop, stop - start)
    elif file.format is Format.PARQUET:
        yield from _cut_table(file, low, high)
    elif low <= 0 < high or (size == 0 and low == 0):
        yield file


def _cut_table(file: Slice, low: int, high: int) -> Iterator[Slice]:
    from tools.preprocess.input.tables import row_groups  # imports pyarrow

    starts = [0, *accumulate(row_groups(Path(file.name)))]
    rows = max(starts[-1], 1)
    inside = [
        group for group, at in enumerate(starts[:-1]) if low <= file.size_bytes * at // rows < high
    ]
    if inside:
        start, stop = starts[inside[0]], starts[inside[-1] + 1]
        yield Slice(file.name, file.format, start, stop, file.size_bytes * (stop - start) // rows)
    elif len(starts) == 1 and low <= 0 < high:
        yield file  # damaged or empty: reading it will show


def _slurm_shard() -> InputShard:
    try:
        task, first, count = (
            int(os.environ[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "COUNT")
        )
    except (KeyError, ValueError):
        raise InputError(
            "--shard slurm needs SLURM_ARRAY_TASK_ID, _MIN and _COUNT; submit with "
            "sbatch --array=0-7, or give i/n."
        ) from None
    return InputShard(task - first, count)


@dataclass(frozen=True)
class Source:
    """Slices in order, and how to read and parse them."""

    slices: tuple[Slice, ...]
    identities: tuple[InputIdentity, ...]
    keys: tuple[str, ...]
    max_document_bytes: int | None
    parser: LineParser
    hub: Hub | None = None

    @property
    def size_bytes(self) -> int:
        """Of everything as stored; 0 if not known."""
        return sum(slice_.size_bytes for slice_ in self.slices)

    @property
    def start(self) -> Position:
        """Where the first block starts."""
        return Position(0, self.slices[0].start if self.slices else 0)

    def blocks(self, start: Position) -> Blocks:
        """All blocks from a position on.

        Raises:
            InputError: A table lacks a column, or the hub fails.
        """
        before = sum(slice_.size_bytes for slice_ in self.slices[: start.slice_index])
        for index in range(start.slice_index, len(self.slices)):
            slice_ = self.slices[index]
            offset = start.offset if index == start.slice_index else slice_.start
            empty = True
            for block in self._open(slice_, offset):
                empty = False
                yield replace(block, slice_index=index, read_bytes=before + block.read_bytes)
            if empty and offset == 0 and slice_.start == 0:
                yield Block(0, 0, before, index, problem=Problem(ProblemKind.EMPTY_FILE, 0))
            before += slice_.size_bytes

    def parse(self, block: Block) -> Documents:
        """Documents of a block."""
        if block.problem is not None:
            lines = int(block.problem.kind is ProblemKind.TOO_LARGE)
            return Documents(tuple([] for _ in self.keys), [], lines, (block.problem,))
        if block.columns is None:
            documents = self.parser.parse(block.data)
        else:
            documents = parse_rows(self.keys, [_values(column) for column in block.columns])
        if self.max_document_bytes is not None and block.size_bytes > self.max_document_bytes:
            return refuse_large(documents, self.max_document_bytes)
        return documents

    def lines_before(self, position: Position) -> int:
        """Lines (or rows) of the whole input before a position in it."""
        slice_ = self.slices[position.slice_index]
        if position.offset == 0 or slice_.format in (Format.PARQUET, Format.HUB):
            return position.offset
        return lines_before(slice_, position.offset)

    def samples(self, count: int) -> list[str]:
        """Up to `count` documents from the start of the first, the middle and the last slice."""
        places = sorted({0, len(self.slices) // 2, len(self.slices) - 1})
        found: list[str] = []
        for index in places if count and self.slices else ():
            slice_ = self.slices[index]
            block = next(self._open(slice_, slice_.start), None)
            if block is not None:
                texts = [_join(text) for column in self.parse(block).columns for text in column]
                found += texts[: -(-count // len(places))]
        return found[:count]

    def _open(self, slice_: Slice, offset: int) -> Blocks:
        if self.hub is not None:
            return self.hub.blocks(slice_, offset, self.keys)
        if slice_.format is Format.PARQUET:
            from tools.preprocess.input.tables import table_blocks  # imports pyarrow

            return table_blocks(slice_, offset, self.keys)
        return line_blocks(slice_, offset, self.max_document_bytes)


def open_source(
    inputs: Sequence[str],
    keys: tuple[str, ...] = ("text",),
    shard: InputShard = WHOLE_INPUT,
    max_document_bytes: int | None = None,
    hub_config: str | None = None,
    hub_split: str = "train",
) -> Source:
    """Find what `--input` names and cut it to the part asked for.

    Raises:
        InputError: Something is missing, or is not what its name says.
    """
    check_keys(keys)
    parser = LineParser(keys)
    if any(name.startswith(HUB_PREFIX) for name in inputs):
        if len(inputs) > 1:
            raise InputError("--input hub:NAME stands alone; run once for each and merge.")
        hub = Hub(inputs[0].removeprefix(HUB_PREFIX), hub_config, hub_split)
        identity = hub.identity()
        rows = (hub.slice(shard.index, shard.count),)
        return Source(rows, (identity,), keys, max_document_bytes, parser, hub)
    files = expand(inputs)
    identities = tuple(identify(file) for file in files)
    slices = cut([whole_file(file) for file in files], shard)
    return Source(slices, identities, keys, max_document_bytes, parser)


def _values(column: object) -> list[object]:
    """Python values of an Arrow column; text that is not UTF-8 comes as bytes."""
    try:
        return column.to_pylist()  # type: ignore[attr-defined, no-any-return]
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]  # type: ignore[attr-defined]


def _value(scalar: object) -> object:
    try:
        return scalar.as_py()  # type: ignore[attr-defined]
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes()  # type: ignore[attr-defined]


def _join(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(text)
