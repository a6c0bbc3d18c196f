"""Results of cells, draws and loss curves, and the files that store them.

`make verify-matrix` writes one `<id>.json` per cell into its folder of the runs folder. The results that the pages
show are stored next to the pages, in `parity/`: the cells in `<version>.jsonl`, draws and curves in further files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from parakit.artifacts.io import write_atomically, write_record
from parakit.artifacts.verdict import VerifyOutcome
from parakit.verify import Judgement


class CellStatus(StrEnum):
    """Outcome of a cell, from the best to the worst."""

    HELD = "held"
    NOT_COMPARABLE = "not comparable"
    MISSING = "not run on CPU"
    REFUSED = "refused"
    CRASHED = "crashed"
    NOT_JUDGED = "not judged"
    """The kit itself raised an error."""
    FLAKY = "flaky"
    DIFFERS = "differs"


STATUS_ORDER = list(CellStatus)
STORED, BF16 = "parity", "dtype/bf16"
"""Folder of stored results next to the pages; path of the level that trains in bf16."""
_EXCEPTION = re.compile(r"\b(\w+(?:Error|Exception|Exit))\b")
_REFUSING_EXCEPTIONS = ("AssertionError", "ValueError", "NotImplementedError")
_MISSING_SOFTWARE = re.compile(
    r"without Transformer Engine|Transformer ?Engine|\bTE\b|CUDA|Apex|apex|NVML|NCCL|grouped.gemm",
)
_VERDICT_FIELDS = (
    *("stage", "module", "tensor", "kind", "error", "tolerance", "worst_ratio"),
    *("compared", "seen", "reason"),
)


@dataclass(frozen=True)
class StageError:
    """The largest errors of a stage of the training step."""

    error: float
    """Relative error."""
    ratio: float
    """Error over its tolerance."""


@dataclass(frozen=True)
class CellRecord:
    """Stored result of a cell."""

    id: str
    family: str
    layout: str
    levels: tuple[str, ...]
    """Paths `factor/level` of the levels that are not a feature's default."""
    command: str
    status: CellStatus
    stage: str | None = None
    module: str | None = None
    tensor: str | None = None
    kind: str | None = None
    error: float | None = None
    tolerance: float | None = None
    worst_ratio: float | None = None
    """Largest error over tolerance; None if it is infinite, or if nothing was compared."""
    compared: int = 0
    seen: int = 0
    reason: str | None = None
    """Why nothing was compared, or how the two attempts of a flaky cell differ."""
    stages: Mapping[str, StageError] = field(default_factory=dict)
    seconds: float = 0.0
    date: str = ""
    megatron: str = ""
    """Version of Megatron, and the commit of a checkout."""
    kit: str = ""
    """Commit of the kit."""
    blamed: tuple[str, ...] | None = None
    """Paths of the fewest levels that give the same status; empty if the layout alone does.

    None means that these levels were not searched.
    """
    smallest: str = ""
    """The command of the smallest cell that still differs."""
    finding: str = ""
    """Id of the known finding that explains the record; empty if none does."""
    more: tuple[str, ...] = ()
    """Flags that make the model smaller; a record with such flags is not shown in the tables."""
    patch: str = ""
    """Patch files that cured known findings in this cell."""

    @property
    def is_right(self) -> bool:
        """True if the cell was compared and held."""
        return self.status is CellStatus.HELD

    @property
    def is_wrong(self) -> bool:
        """True if tensors differ, in every attempt or in one."""
        return self.status in (CellStatus.DIFFERS, CellStatus.FLAKY)

    @property
    def sentence(self) -> str:
        """The outcome in a few words; empty if there is nothing to add to the status."""
        if self.status is CellStatus.DIFFERS:
            return f"{self.stage}, {self.module}: {self.kind}"
        if self.is_right:
            return f"{self.worst_ratio or 0:.2f} of its tolerance"
        return self.reason or ""


def classify_reason(reason: str) -> CellStatus:
    """Return the status of a cell in which nothing was compared, judged by the reason's sentence.

    The status is *missing* if the sentence names software for GPUs. It is *refused* if the sentence names an
    exception with which Megatron refuses arguments. Otherwise it is *crashed*.
    """
    if "ended with" not in reason and "was not written" not in reason:
        return CellStatus.NOT_COMPARABLE
    if _MISSING_SOFTWARE.search(reason):
        return CellStatus.MISSING
    exception = _EXCEPTION.search(reason)
    if exception is None:
        is_refused = " error: " in reason or "usage: " in reason  # argparse refuses an argument.
    else:
        is_refused = exception[1] in _REFUSING_EXCEPTIONS
    return CellStatus.REFUSED if is_refused else CellStatus.CRASHED


def summarise_judgement(judgement: Judgement) -> dict[str, Any]:
    """Return the fields of a `CellRecord` that a judgement decides: status, first wrong tensor, errors by stage.

    An infinite error becomes None. The largest error of a stage is the largest finite one.
    """
    verdict = judgement.verdict
    record_fields = {name: getattr(verdict, name) for name in _VERDICT_FIELDS}
    for name in ("error", "worst_ratio"):
        value = record_fields[name]
        if value is not None and not value < float("inf"):  # NaN is not below infinity either.
            record_fields[name] = None
    if verdict.verdict is VerifyOutcome.NOT_COMPARABLE:
        record_fields["status"] = classify_reason(verdict.reason or "")
    else:
        record_fields["status"] = CellStatus(verdict.verdict)
    record_fields["stages"] = _find_largest_errors(judgement)
    return record_fields


def _find_largest_errors(judgement: Judgement) -> dict[str, StageError]:
    """Return the largest finite error and ratio per stage; empty if no tensors were compared."""
    if judgement.compared is None:
        return {}
    largest_errors: dict[str, StageError] = {}
    for comparison in judgement.compared.comparisons:
        error, ratio = comparison.error, comparison.ratio
        if np.isfinite(error) and np.isfinite(ratio):
            stage = str(comparison.key[0])
            largest = largest_errors.get(stage, StageError(0.0, 0.0))
            error, ratio = max(largest.error, error), max(largest.ratio, ratio)
            largest_errors[stage] = StageError(error, ratio)
    return largest_errors


@dataclass(frozen=True)
class FuzzResult:
    """Results of `make verify-fuzz` with one seed."""

    seed: int
    records: tuple[CellRecord, ...]
    """Records of all verified cells, also of those that only the search for smaller cells verified."""
    found: tuple[CellRecord, ...]
    """The smallest cell that differs, for each draw that differs."""


@dataclass(frozen=True)
class CurveDistances:
    """Distances between loss curves of a layout: largest and mean absolute difference of two curves."""

    layout: str
    fp32: tuple[float, float]
    """Layout in fp32 against one rank in fp32."""
    bf16: tuple[float, float]
    """Layout in bf16 against one rank in bf16."""
    cost: tuple[float, float]
    """Layout in bf16 against the same layout in fp32."""
    last_fp32: float
    last_bf16: float


def read_json_files[T](folder: Path, pattern: str, kind: type[T]) -> list[T]:
    """Return the decoded JSON files of a folder that match a pattern, sorted by file name.

    Raises:
        msgspec.ValidationError: Another version of the kit wrote a file.
    """
    return [
        msgspec.json.decode(path.read_bytes(), type=kind) for path in sorted(folder.glob(pattern))
    ]


def store_json(folder: Path, name: str, record: object) -> None:
    """Write curves, draws or executed files of a version as JSON next to its cells, in place of an older file."""
    write_record(_make_stored_path(folder, name), record)


def store_cells(folder: Path, name: str, records: Iterable[CellRecord]) -> None:
    """Add records to the file of a version, in place of records with the same id.

    Records of smaller models are left out.
    """
    path = _make_stored_path(folder, f"{name}.jsonl")
    stored = {record.id: record for record in read_stored_cells(path)}
    stored |= {record.id: record for record in records if not record.more}
    lines = (msgspec.json.encode(_encode_record(stored[key])) + b"\n" for key in sorted(stored))
    write_atomically(path, b"".join(lines))


def read_stored_cells(path: Path) -> list[CellRecord]:
    """Return the records in the file of a version; an empty list if there is no file."""
    lines = path.read_bytes().splitlines() if path.is_file() else ()
    return [msgspec.json.decode(line, type=CellRecord) for line in lines]


def _make_stored_path(folder: Path, name: str) -> Path:
    """Return the path of a stored file next to the pages, and make its folder."""
    (folder / STORED).mkdir(parents=True, exist_ok=True)
    return folder / STORED / name


def _encode_record(record: CellRecord) -> dict[str, object]:
    """Return the fields of a record that differ from their defaults; floats have four digits.

    Errors by stage are only stored for cells in bf16, whose table shows them.
    """
    encoded: dict[str, object] = {}
    for record_field in fields(CellRecord):
        name = record_field.name
        value = getattr(record, name)
        default = {} if name == "stages" else record_field.default
        is_left_out = name == "stages" and BF16 not in record.levels
        if value != default and not is_left_out:
            encoded[name] = float(f"{value:.4g}") if isinstance(value, float) else value
    return encoded
