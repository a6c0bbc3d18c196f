"""Parquet files as blocks of rows, one row group after the other, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tools.preprocess.errors import InputError
from tools.preprocess.input.documents import Problem, ProblemKind
from tools.preprocess.input.files import BLOCK_BYTES, Block, Blocks, Slice

_MOST_ROWS = 1 << 16
_READ_BYTES = 1 << 20


def table_blocks(slice_: Slice, offset: int, keys: Sequence[str]) -> Blocks:
    """Blocks of a slice, from row `offset` on.

    Raises:
        InputError: A column is missing.
    """
    try:
        with _open(slice_.name) as file:
            check_columns(file.schema_arrow.names, slice_.name, keys)
            yield from _rows(file, slice_, offset, keys)
    except pa.ArrowException as error:
        problem = Problem(ProblemKind.BROKEN_ARCHIVE, 0, str(error).splitlines()[0])
        yield Block(offset, 0, 0, problem=problem)


def row_groups(path: Path) -> list[int]:
    """Rows of each row group; none if the file is damaged, which reading it will show."""
    try:
        with _open(str(path)) as file:
            metadata = file.metadata
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except pa.ArrowException:
        return []


def record_blocks(batch: Any, keys: Sequence[str], offset: int, read_bytes: int) -> Iterator[Block]:
    """Cut a record batch (or table) that starts at row `offset` into blocks of `BLOCK_BYTES`."""
    rows = batch.num_rows
    step = max(1, rows * BLOCK_BYTES // max(batch.nbytes, 1))
    for start in range(0, rows, step):
        piece = batch.slice(start, step)
        yield Block(
            next_offset=offset + start + piece.num_rows,
            size_bytes=piece.nbytes,
            read_bytes=read_bytes,
            columns=tuple(piece.column(key) for key in keys),
        )


def check_columns(columns: Sequence[str], name: str, keys: Sequence[str]) -> None:
    """Refuse a table without a column that is asked for.

    Raises:
        InputError: One is missing.
    """
    for key in keys:
        if key not in columns:
            raise InputError(
                f"{name} has no column '{key}', only {', '.join(columns)}; "
                "name the right one with --json-keys."
            )


def _open(name: str) -> Any:
    return pq.ParquetFile(name, memory_map=False, pre_buffer=False, buffer_size=_READ_BYTES)


def _rows(file: Any, slice_: Slice, offset: int, keys: Sequence[str]) -> Blocks:
    total = max(file.metadata.num_rows, 1)
    stop = file.metadata.num_rows if slice_.stop is None else slice_.stop
    first = 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first + rows > offset and first < stop:
            row = first
            batches = file.iter_batches(
                _rows_a_batch(file, group, keys), [group], columns=list(keys), use_threads=False
            )
            for batch in batches:
                read = slice_.size_bytes * (row - slice_.start) // total
                for block in record_blocks(batch, keys, row, read):
                    if block.next_offset > offset:
                        yield block
                row += batch.num_rows
        first += rows


def _rows_a_batch(file: Any, group: int, keys: Sequence[str]) -> int:
    metadata = file.metadata.row_group(group)
    columns = [metadata.column(i) for i in range(metadata.num_columns)]
    size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in keys)
    rows: int = metadata.num_rows * BLOCK_BYTES // max(size, 1)
    return max(1, min(_MOST_ROWS, rows))
