"""Read the file of published measurements: one figure per line, with its source, strategy and batch.

`readings.csv.gz` holds facts from public repositories and papers, collected on 2026-11-21 and 23; `README.md` says what
each column means. A file of the user's own measurements has the same columns, compressed or not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from parakit.config.files import UnreadableFileError, read_csv_rows, read_text
from parakit.costs import FLOP_CONVENTIONS
from parakit.planner.readings.fact_columns import (
    FACT_COLUMNS,
    Fact,
    describe_fact_values,
    parse_fact,
)

MEASUREMENTS_FILE = Path(__file__).with_name("readings.csv.gz")

_TEXT_COLUMNS = ("source", "url_or_path", "model", "gpu", "dtype", "recompute", "metric", "notes")
_WHOLE_COLUMNS = (
    "layers",
    "hidden",
    "heads",
    "seq",
    "vocab",
    "gpus",
    "tp",
    "pp",
    "vpp",
    "cp",
    "dp",
    "ep",
)
_BATCH_COLUMNS = ("mbs", "gbs")
COLUMNS = (*_TEXT_COLUMNS, *_WHOLE_COLUMNS, *_BATCH_COLUMNS, "params_b", "value", "ffn")
OWN_COLUMNS = ("flags", "fused")
"""Columns of the user's own measurements, which `make report` writes. Other files may lack them."""
_UNCHANGED_COLUMNS = (*_TEXT_COLUMNS, *OWN_COLUMNS, "counts")
_NUMBER_COLUMNS = (*_WHOLE_COLUMNS, *_BATCH_COLUMNS)
OPTIONAL_COLUMNS = (*OWN_COLUMNS, "counts", *FACT_COLUMNS)

METRICS = (
    "step_time_s",
    "tokens_per_s_per_gpu",
    "model_tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu_percent",
    "matmul_tflops",
    "memory_allocated_bytes",
    "peak_memory_allocated_bytes",
    "peak_memory_gib",
    "peak_memory_gb",
    "device_memory_gb",
)
"""Kinds of figures; the unit is part of the name."""

_OLD_ADAPTER_COLUMN = "frozen"
"""Name of the column `peft` in files of earlier versions, which had yes and no."""
_MOST_DIGITS = 18
"""Most digits of a whole number."""

_ADDED_NOTES = ("added 2026-11-23", "added 2026-11-26", "added 2026-11-29")
"""Ends of the notes of rows that were added after the constants had been fitted."""


class MeasurementsError(ValueError):
    """Error of a file that is no table of measurements; the message names file, row and column."""


@dataclass(frozen=True)
class PublishedMeasurement:
    """One published value, with the run that was measured. None means that the source does not state a field."""

    line: int
    """Line in the file; the header is line 1."""
    source: str
    metric: str
    value: float
    where: str = ""
    model: str = ""
    params_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    ffn: int | None = None
    expert_ffn: int | None = None
    """FFN hidden size of one expert, where the source states it (`1536/expert`)."""
    seq: int | None = None
    vocab: int | None = None
    gpu: str = ""
    gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    dp: int | None = None
    ep: int | None = None
    mbs: int | None = None
    gbs: int | None = None
    dtype: str = ""
    recompute: str = ""
    notes: str = ""
    flags: str = ""
    """Flags of Megatron that describe the run in full; they say more than the other columns."""
    fused: str = ""
    """Patches of the kit that fuse kernels, as `FUSED=` names them."""
    counts: str = ""
    """Operations that the figure counts as FLOPs, in words of `src/parakit/costs/flops.py: COUNTS`. If empty, they are
    those of the source."""
    facts: tuple[tuple[str, Fact], ...] = ()
    """Facts about the trainer that columns of the row state, by name (`FACT_COLUMNS`)."""

    @property
    def is_held_out(self) -> bool:
        """True if the measurement is held out, so that no fit of the constants uses it.

        A third of the measurements is held out, chosen by a hash of the run. The hash leaves out the measured value, so
        all measurements of one strategy are either held out or not. Rows that were added after 2026-11-23 are held out
        too.
        """
        if self.notes.endswith(_ADDED_NOTES):
            return True
        degrees = (self.gpus, self.tp, self.pp, self.vpp, self.cp, self.dp, self.ep)
        batch = (self.mbs, self.gbs, self.seq, self.dtype, self.recompute)
        return crc32(repr((self.model, self.gpu, *degrees, *batch)).encode()) % 3 == 0


@dataclass(frozen=True)
class Refusal:
    """A row that is not predicted, with the reason."""

    line: int
    source: str
    reason: str


def read_measurements(
    path: Path = MEASUREMENTS_FILE,
) -> tuple[tuple[PublishedMeasurement, ...], tuple[Refusal, ...]]:
    """Return the measurements of a file in order, and a refusal with a reason for each row that cannot be read.

    Raises:
        MeasurementsError: The file cannot be read, lacks a column, or has no row that can be read.
    """
    if path == MEASUREMENTS_FILE:
        return _read_shipped_file()
    return _parse_rows(read_rows(path)[1], path)


@functools.cache
def _read_shipped_file() -> tuple[tuple[PublishedMeasurement, ...], tuple[Refusal, ...]]:
    """Return what `read_measurements` returns for the shipped file, which no process changes. Parsing takes 0.1 s."""
    return _parse_rows(_read_shipped_rows(), MEASUREMENTS_FILE)


@functools.cache
def read_shipped_measurements_on_gpu(gpu_kind: str) -> tuple[PublishedMeasurement, ...]:
    """Return the shipped measurements on one kind of GPU, in order. Rows of other kinds are not parsed.

    Args:
        gpu_kind: Kind of GPU, as `name_gpu_kind` returns it.
    """
    return tuple(
        _parse_row(line, row)
        for line, row in _read_shipped_rows()
        if name_gpu_kind(row["gpu"]) == gpu_kind
    )


@functools.cache
def _read_shipped_rows() -> list[tuple[int, dict[str, str]]]:
    """Return the rows of the shipped file."""
    return read_rows(MEASUREMENTS_FILE)[1]


def name_gpu_kind(gpu: str) -> str:
    """Return the part of a GPU's name that its variants share, such as `a100` of `A100-80GB`."""
    return gpu.lower().split("-")[0]


def _parse_rows(
    rows: list[tuple[int, dict[str, str]]], path: Path
) -> tuple[tuple[PublishedMeasurement, ...], tuple[Refusal, ...]]:
    """Return the measurements of rows in order, and a refusal with a reason for each row that cannot be read.

    Args:
        rows: Rows, as `read_rows` returns them.
        path: File of the rows, for errors.

    Raises:
        MeasurementsError: No row can be read.
    """
    measurements: list[PublishedMeasurement] = []
    unreadable: list[Refusal] = []
    for line, row in rows:
        try:
            measurements.append(_parse_row(line, row))
        except MeasurementsError as error:
            unreadable.append(Refusal(line, row["source"], str(error)))
    if unreadable and not measurements:
        raise MeasurementsError(f"{path}: {unreadable[0].reason}")
    if not measurements:
        raise MeasurementsError(
            f"{path} holds no measurement; add one a line below the names of the columns."
        )
    return tuple(measurements), tuple(unreadable)


def read_rows(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Return the names of the columns of a file of measurements, and one pair per row.

    A pair has the row's line in the file, and the row's cells by column, without blanks around them. Missing cells and
    missing optional columns are empty texts.

    Raises:
        MeasurementsError: The file cannot be read, lacks a column, names one twice, or has a column of an earlier
            version.
    """
    try:
        rows = list(read_csv_rows(read_text(path), path))
    except UnreadableFileError as error:
        raise MeasurementsError(str(error)) from None
    columns = rows[0][1] if rows else []
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise MeasurementsError(
            f"{path}: row 1 lacks {', '.join(missing)}; the first line names the columns, "
            "as in src/parakit/planner/readings/README.md."
        )
    known_columns = (*COLUMNS, *OPTIONAL_COLUMNS)
    if _OLD_ADAPTER_COLUMN in columns:
        raise MeasurementsError(
            f"{path}: row 1 names the column {_OLD_ADAPTER_COLUMN}, which is peft now; write lora in place of yes, "
            "and none in place of no."
        )
    repeated = [name for name in known_columns if columns.count(name) > 1]
    if repeated:
        raise MeasurementsError(
            f"{path}: row 1 names the column {repeated[0]} twice; leave one of them out."
        )
    blank = dict.fromkeys((*columns, *OPTIONAL_COLUMNS), "")
    rows_by_column = []
    for line, cells in rows[1:]:
        row = blank.copy()
        for column, text in zip(columns, cells, strict=False):
            # Most cells are empty, and a third of the time is saved if they are skipped.
            if text:
                row[column] = text.strip()
        rows_by_column.append((line, row))
    return columns, rows_by_column


def _parse_row(line: int, row: Mapping[str, str]) -> PublishedMeasurement:
    """Return the measurement that a row describes.

    Args:
        line: Line of the row in the file.
        row: Cells of the row by column, as `read_rows` returns them.

    Raises:
        MeasurementsError: A cell cannot be read.
    """
    cells = _RowCells(line, row)
    value = cells.number("value")
    if value is None:
        raise MeasurementsError(
            f"row {line}, column value: it is empty; name the figure, or leave the row out"
        )
    if row["metric"] not in METRICS:
        raise cells.error("metric", f"one of {', '.join(METRICS)}")
    ffn, _, is_per_expert = row["ffn"].partition("/")
    ffn_hidden = cells.whole("ffn", ffn)
    unknown = sorted(set(row["counts"].split()) - set(FLOP_CONVENTIONS))
    if unknown:
        raise cells.error(
            "counts", f"made of {', '.join(FLOP_CONVENTIONS)}, but also of {', '.join(unknown)}"
        )
    texts: Any = {name: row[name] for name in _UNCHANGED_COLUMNS}
    numbers: Any = {name: cells.whole(name, row[name]) for name in _NUMBER_COLUMNS if row[name]}
    return PublishedMeasurement(
        line=line,
        where=texts.pop("url_or_path"),
        params_b=cells.number("params_b"),
        value=value,
        ffn=None if is_per_expert else ffn_hidden,
        expert_ffn=ffn_hidden if is_per_expert else None,
        facts=cells.facts(),
        **texts,
        **numbers,
    )


@dataclass(frozen=True)
class _RowCells:
    """Cells of a row by column, and their numbers."""

    line: int
    texts: Mapping[str, str]

    def error(self, column: str, expected: str) -> MeasurementsError:
        """Return an error which says that the cell of a column is not `expected`, such as `a number above 0`."""
        return MeasurementsError(
            f"row {self.line}, column {column}: '{self.texts[column]:.40}' is not {expected}; correct the "
            "cell, or leave it empty where it is not known"
        )

    def facts(self) -> tuple[tuple[str, Fact], ...]:
        """Return the facts that cells state, by name.

        Raises:
            MeasurementsError: A cell is no value of its fact.
        """
        facts = []
        for name in FACT_COLUMNS:
            text = self.texts[name]
            if not text:
                continue
            try:
                facts.append((name, parse_fact(name, text)))
            except ValueError:
                raise self.error(name, describe_fact_values(name)) from None
        return tuple(facts)

    def whole(self, column: str, text: str) -> int | None:
        """Parse a whole number above 0 from `text`. An empty text gives None.

        Args:
            column: Name of the column, for the error.
            text: The text to parse.

        Raises:
            MeasurementsError: The text is no whole number above 0.
        """
        if not text:
            return None
        # pandas writes whole numbers beside empty cells with a decimal point.
        text = text.removesuffix(".0")
        if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
            raise self.error(column, "a whole number above 0")
        return int(text)

    def number(self, column: str) -> float | None:
        """Return the number in a column's cell, or None for an empty cell.

        Raises:
            MeasurementsError: The cell is no number above 0.
        """
        text = self.texts[column]
        if not text:
            return None
        with suppress(ValueError):
            value = float(text)
            if 0 < value < math.inf:
                return value
        raise self.error(column, "a number above 0")
