"""The file of readings: one published figure a line, with its source, strategy and batch.

`readings.csv.gz` holds facts from public repositories and papers, collected 2026-11-21 and 23;
`README.md` says what each column means. A file of one's own has the same columns, compressed or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from parakit.config.files import UnreadableFileError, read_csv_rows, read_text
from parakit.costs import FLOP_CONVENTIONS

MEASUREMENTS_FILE = Path(__file__).with_name("readings.csv.gz")

_WORDS = ("source", "url_or_path", "model", "gpu", "dtype", "recompute", "metric", "notes")
_WHOLE = ("layers", "hidden", "heads", "seq", "vocab", "gpus", "tp", "pp", "vpp", "cp", "dp", "ep")
_BATCH = ("mbs", "gbs")
COLUMNS = (*_WORDS, *_WHOLE, *_BATCH, "params_b", "value", "ffn")
OWN_COLUMNS = ("flags", "fused")
"""Columns that a file may lack; `make report` writes them."""
OPTIONAL_COLUMNS = (*OWN_COLUMNS, "counts")

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
"""What a figure is; the unit is part of the name."""

_LONGEST = 18
"""Digits of a whole number."""

_ADDED = ("added 2026-11-23", "added 2026-11-26")
"""How the notes of rows end that were added after the constants had been fitted."""


class MeasurementsError(ValueError):
    """A file that is no table of measurements; the message names file, row and column."""


@dataclass(frozen=True)
class PublishedMeasurement:
    """One published figure; None is what its source does not state."""

    line: int
    """In the file; the header is line 1."""
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
    """Columns of one expert, where the source states those (`1536/expert`)."""
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
    """Megatron's, all that give the run again: they say more than the other columns."""
    fused: str = ""
    """The kit's patches of its kernels, as `FUSED=` names them."""
    counts: str = ""
    """How its FLOP/s are counted, in words of `src/parakit/costs/flops.py: COUNTS`; empty takes its source's."""

    @property
    def is_held_out(self) -> bool:
        """Whether no fit uses it: one of the third kept back since 2026-11-23, or a row added since.

        The third by a hash of what ran and not of its figure: all readings of a strategy are on one
        side. What was added was predicted once before anything was chosen with it in sight.
        """
        if self.notes.endswith(_ADDED):
            return True
        degrees = (self.gpus, self.tp, self.pp, self.vpp, self.cp, self.dp, self.ep)
        batch = (self.mbs, self.gbs, self.seq, self.dtype, self.recompute)
        return crc32(repr((self.model, self.gpu, *degrees, *batch)).encode()) % 3 == 0


@dataclass(frozen=True)
class Refusal:
    """A row that is not predicted, and why."""

    line: int
    source: str
    reason: str


def read_measurements(
    path: Path = MEASUREMENTS_FILE,
) -> tuple[tuple[PublishedMeasurement, ...], tuple[Refusal, ...]]:
    """Every row of a file of readings, in order, and those that cannot be read.

    Raises:
        MeasurementsError: It cannot be read, lacks a column, or has no row that can be read.
    """
    found: list[PublishedMeasurement] = []
    unreadable: list[Refusal] = []
    for line, row in read_rows(path)[1]:
        try:
            found.append(_reading(line, row))
        except MeasurementsError as error:
            unreadable.append(Refusal(line, row["source"].strip(), str(error)))
    if unreadable and not found:
        raise MeasurementsError(f"{path}: {unreadable[0].reason}")
    if not found:
        raise MeasurementsError(
            f"{path} holds no measurement; add one a line below the names of the columns."
        )
    return tuple(found), tuple(unreadable)


def read_rows(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Columns of a file of readings, and its rows by column, each with its line in the file.

    Raises:
        MeasurementsError: It cannot be read, or lacks a column or names one twice.
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
    if twice := [name for name in (*COLUMNS, *OPTIONAL_COLUMNS) if columns.count(name) > 1]:
        raise MeasurementsError(
            f"{path}: row 1 names the column {twice[0]} twice; leave one of them out."
        )
    blank = dict.fromkeys((*columns, *OPTIONAL_COLUMNS), "")
    return columns, [
        (line, blank | dict(zip(columns, cells, strict=False))) for line, cells in rows[1:]
    ]


def _reading(line: int, row: Mapping[str, str]) -> PublishedMeasurement:
    cells = {name: row[name].strip() for name in (*COLUMNS, *OPTIONAL_COLUMNS)}

    def wrong(column: str, wanted: str) -> MeasurementsError:
        return MeasurementsError(
            f"row {line}, column {column}: '{cells[column]:.40}' is not {wanted}; correct the cell, or "
            "leave it empty where it is not known"
        )

    def whole(column: str, text: str) -> int | None:
        if not text:
            return None
        text = text.removesuffix(".0")  # As pandas writes whole numbers beside empty cells.
        if not text.isdecimal() or len(text) > _LONGEST or int(text) < 1:
            raise wrong(column, "a whole number above 0")
        return int(text)

    def number(column: str) -> float | None:
        if not cells[column]:
            return None
        with suppress(ValueError):
            if 0 < (value := float(cells[column])) < math.inf:
                return value
        raise wrong(column, "a number above 0")

    if (value := number("value")) is None:
        raise MeasurementsError(
            f"row {line}, column value: it is empty; name the figure, or leave the row out"
        )
    if cells["metric"] not in METRICS:
        raise wrong("metric", f"one of {', '.join(METRICS)}")
    ffn, _, of_experts = cells["ffn"].partition("/")
    columns = whole("ffn", ffn)
    if unknown := sorted(set(cells["counts"].split()) - set(FLOP_CONVENTIONS)):
        raise wrong(
            "counts", f"made of {', '.join(FLOP_CONVENTIONS)}, but also of {', '.join(unknown)}"
        )
    words: Any = {name: cells[name] for name in (*_WORDS, *OPTIONAL_COLUMNS)}
    wholes: Any = {name: whole(name, cells[name]) for name in (*_WHOLE, *_BATCH)}
    return PublishedMeasurement(
        line=line,
        where=words.pop("url_or_path"),
        params_b=number("params_b"),
        value=value,
        ffn=None if of_experts else columns,
        expert_ffn=columns if of_experts else None,
        **words,
        **wholes,
    )
