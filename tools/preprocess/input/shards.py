"""`--shard i/n`: the i-th of n stretches of the input; merged in order they give all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.preprocess.errors import InputError
from tools.preprocess.input.files import Format, Slice
from tools.preprocess.input.lines import next_line_start


@dataclass(frozen=True)
class InputShard:
    """One of `count` parts; `index` counts from 0."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


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

    groups = row_groups(Path(file.name))
    total = max(sum(groups), 1)
    row, start, stop = 0, None, 0
    for rows in groups:
        if low <= file.size_bytes * row // total < high:
            start, stop = (row if start is None else start), row + rows
        row += rows
    if start is not None:
        yield Slice(file.name, file.format, start, stop, file.size_bytes * (stop - start) // total)
    elif not groups and low <= 0 < high:
        yield file


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
