"""Parquet files as blocks of rows, one row group after the other, in bounded memory."""

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
    """Blocks of a slice, from row `offset` on."""
    try:
        with _open(slice_.name) as file:
            check_columns(file.schema_arrow.names, slice_.name, keys)
            yield from _rows(file, slice_, offset, keys)
    except pa.ArrowException as error:
        problem = Problem(ProblemKind.BROKEN_ARCHIVE, str(error).splitlines()[0])
        yield Block(offset, 0, 0, problem)


def row_groups(name: str) -> list[int]:
    """Rows of each row group; none if the file is damaged, which reading it will show."""
    try:
        with _open(name) as file:
            metadata = file.metadata
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except pa.ArrowException:
        return []


def row_block(rows: Any, keys: Sequence[str], end: int, read_bytes: int) -> Block:
    """The block of a record batch (or table) that ends before row `end`."""
    return Block(
        end, rows.nbytes, read_bytes, tuple(_cast_to_bytes(rows.column(key)) for key in keys)
    )


def check_columns(columns: Sequence[str], name: str, keys: Sequence[str]) -> None:
    """Refuse a table without a column that is asked for."""
    for key in keys:
        if key not in columns:
            raise DatasetError(
                f"{name} has no column '{key}', only {', '.join(columns)}; "
                "name the right one with --json-keys."
            )


def _cast_to_bytes(column: Any) -> Any:
    """Text as bytes, since Arrow does not look whether it is UTF-8."""
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    return column.cast(pa.large_binary()) if is_text else column


def _open(name: str) -> Any:
    return pq.ParquetFile(name, memory_map=False, pre_buffer=False, buffer_size=_READ_BYTES)


def _rows(file: Any, slice_: Slice, offset: int, keys: Sequence[str]) -> Iterator[Block]:
    metadata = file.metadata
    stop = metadata.num_rows if slice_.stop is None else slice_.stop
    row = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if row + group.num_rows <= offset or row >= stop:
            row += group.num_rows
            continue
        size = _rows_a_batch(group, keys)
        for batch in file.iter_batches(size, [number], columns=list(keys), use_threads=False):
            read = slice_.size_bytes * (row - slice_.start) // max(stop - slice_.start, 1)
            rest = batch.slice(max(0, offset - row))
            row += batch.num_rows
            if rest.num_rows:
                yield row_block(rest, keys, row, read)


def _rows_a_batch(group: Any, keys: Sequence[str]) -> int:
    """So many that the columns asked for come to about a block."""
    columns = [group.column(i) for i in range(group.num_columns)]
    size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in keys)
    rows: int = group.num_rows * BLOCK_BYTES // max(size, 1)
    return max(1, min(_MOST_ROWS, rows))
