"""Read parquet files as blocks of rows, one row group after another, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parakit.data import DatasetError
from tools.preprocess.documents import Problem, ProblemKind
from tools.preprocess.lines import BLOCK_BYTES, Block, Slice

_MOST_ROWS = 1 << 16
_READ_BYTES = 1 << 20


def table_blocks(slice_: Slice, offset: int, keys: Sequence[str]) -> Iterator[Block]:
    """Read the rows of a slice of a parquet file, from row `offset` on, and yield them as blocks.

    If the file is damaged, the last block has no rows and describes the problem.

    Raises:
        DatasetError: The file lacks a column.
    """
    try:
        with _open(slice_.name) as file:
            check_columns(file.schema_arrow.names, slice_.name, keys)
            yield from _read_rows(file, slice_, offset, keys)
    except pa.ArrowException as error:
        problem = Problem(ProblemKind.BROKEN_ARCHIVE, str(error).splitlines()[0])
        yield Block(offset, 0, 0, problem)


def row_groups(name: str) -> list[int]:
    """Return the number of rows of each row group of a parquet file.

    The list is empty if the file is damaged. The damage is reported later, when `table_blocks` reads the file.
    """
    try:
        with _open(name) as file:
            metadata = file.metadata
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except pa.ArrowException:
        return []


def row_block(rows: Any, keys: Sequence[str], end: int, read_bytes: int) -> Block:
    """Return a block with the columns of `keys` from a record batch or table.

    Args:
        rows: The record batch or table.
        keys: Names of the columns.
        end: Index in the file of the first row after the batch.
        read_bytes: Bytes of the file that have been read so far.
    """
    return Block(
        end, rows.nbytes, read_bytes, tuple(_cast_to_bytes(rows.column(key)) for key in keys)
    )


def check_columns(columns: Sequence[str], name: str, keys: Sequence[str]) -> None:
    """Raise DatasetError if a table lacks the column of a key."""
    for key in keys:
        if key not in columns:
            raise DatasetError(
                f"{name} has no column '{key}', only {', '.join(columns)}; "
                "name the right one with --json-keys."
            )


def _cast_to_bytes(column: Any) -> Any:
    """Return a column of text as bytes, because Arrow does not check that text is UTF-8."""
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    return column.cast(pa.large_binary()) if is_text else column


def _open(name: str) -> Any:
    """Open a parquet file so that it is read in small pieces."""
    return pq.ParquetFile(name, memory_map=False, pre_buffer=False, buffer_size=_READ_BYTES)


def _read_rows(file: Any, slice_: Slice, offset: int, keys: Sequence[str]) -> Iterator[Block]:
    """Yield the rows of a slice of a parquet file as blocks, from row `offset` on.

    Row groups outside of the slice or before `offset` are not read.
    """
    metadata = file.metadata
    stop = metadata.num_rows if slice_.stop is None else slice_.stop
    num_rows = max(stop - slice_.start, 1)
    row = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if row + group.num_rows <= offset or row >= stop:
            row += group.num_rows
            continue
        size = _count_rows_per_batch(group, keys)
        for batch in file.iter_batches(size, [number], columns=list(keys), use_threads=False):
            # The file's bytes are taken as evenly distributed over its rows.
            read_bytes = slice_.size_bytes * (row - slice_.start) // num_rows
            unread = batch.slice(max(0, offset - row))
            row += batch.num_rows
            if unread.num_rows:
                yield row_block(unread, keys, end=row, read_bytes=read_bytes)


def _count_rows_per_batch(group: Any, keys: Sequence[str]) -> int:
    """Return the number of rows with which the columns of the keys have about `BLOCK_BYTES` bytes."""
    size_bytes = 0
    for index in range(group.num_columns):
        column = group.column(index)
        # A nested column is a path, such as `text.list.element`. Its first part is the key.
        if column.path_in_schema.split(".")[0] in keys:
            size_bytes += column.total_uncompressed_size
    rows: int = group.num_rows * BLOCK_BYTES // max(size_bytes, 1)
    return max(1, min(_MOST_ROWS, rows))
