"""What became of cells, draws and curves, and their files.

A cell that was verified is `<folder>/<id>.json`; what is kept beside the pages is
`parity/<version>.jsonl`, and a file more for draws and for curves.
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
    """What a cell comes to, the worst last."""

    HELD = "held"
    NOT_COMPARABLE = "not comparable"
    MISSING = "not run on CPU"
    REFUSED = "refused"
    CRASHED = "crashed"
    NOT_JUDGED = "not judged"
    """The kit itself failed."""
    FLAKY = "flaky"
    DIFFERS = "differs"


STATUS_ORDER = list(CellStatus)
STORED, BF16 = "parity", "dtype/bf16"
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
    """The largest of a stage."""

    error: float
    """Relative."""
    ratio: float
    """Over its tolerance."""


@dataclass(frozen=True)
class CellRecord:
    """What is kept of a cell."""

    id: str
    family: str
    layout: str
    levels: tuple[str, ...]
    """`factor/level`, those that are not a feature's first."""
    command: str
    status: CellStatus
    stage: str | None = None
    module: str | None = None
    tensor: str | None = None
    kind: str | None = None
    error: float | None = None
    tolerance: float | None = None
    worst_ratio: float | None = None
    """Largest error over tolerance; None where it is infinite, or nothing was compared."""
    compared: int = 0
    seen: int = 0
    reason: str | None = None
    """Why nothing was compared, or how two tries of a flaky cell differ."""
    stages: Mapping[str, StageError] = field(default_factory=dict)
    seconds: float = 0.0
    date: str = ""
    megatron: str = ""
    """Version, and commit of a checkout."""
    kit: str = ""
    """Commit."""
    blamed: tuple[str, ...] | None = None
    """The fewest levels that are as wrong; empty: the strategy by itself. None: not looked for."""
    smallest: str = ""
    """The command of the smallest cell that still differs."""
    finding: str = ""
    """The known finding that this is."""
    more: tuple[str, ...] = ()
    """Further flags, of a smaller model: no cell of the tables."""
    patch: str = ""
    """Patch files that cured known findings here."""

    @property
    def is_right(self) -> bool:
        """Whether all was compared and held."""
        return self.status is CellStatus.HELD

    @property
    def is_wrong(self) -> bool:
        """Whether tensors differ, each time or sometimes."""
        return self.status in (CellStatus.DIFFERS, CellStatus.FLAKY)

    @property
    def sentence(self) -> str:
        """In a few words."""
        if self.status is CellStatus.DIFFERS:
            return f"{self.stage}, {self.module}: {self.kind}"
        if self.is_right:
            return f"{self.worst_ratio or 0:.2f} of its tolerance"
        return self.reason or ""


def classify_reason(reason: str) -> CellStatus:
    """What a sentence means by which a run, or a comparison, did not happen."""
    if "ended with" not in reason and "was not written" not in reason:
        return CellStatus.NOT_COMPARABLE
    if _MISSING_SOFTWARE.search(reason):
        return CellStatus.MISSING
    named = _EXCEPTION.search(reason)
    if named is None:
        said = any(word in reason for word in (" error: ", "usage: "))
        return CellStatus.REFUSED if said else CellStatus.CRASHED
    return CellStatus.REFUSED if named[1] in _REFUSING_EXCEPTIONS else CellStatus.CRASHED


def summarise_judgement(judgement: Judgement) -> dict[str, Any]:
    """Fields of a record without a second try: the verdict's, infinite ones empty, and of each stage
    the largest error that is finite."""
    verdict = judgement.verdict
    found = {name: getattr(verdict, name) for name in _VERDICT_FIELDS}
    for name in ("error", "worst_ratio"):
        value = found[name]
        found[name] = value if value is not None and value < float("inf") else None
    found["status"] = (
        classify_reason(verdict.reason or "")
        if verdict.verdict is VerifyOutcome.NOT_COMPARABLE
        else CellStatus(verdict.verdict)
    )
    stages: dict[str, StageError] = {}
    for one in judgement.compared.comparisons if judgement.compared else ():
        name = str(one.key[0])
        before = stages.get(name, StageError(0.0, 0.0))
        if np.isfinite(one.error) and np.isfinite(one.ratio):
            stages[name] = StageError(max(before.error, one.error), max(before.ratio, one.ratio))
    return {**found, "stages": stages}


@dataclass(frozen=True)
class FuzzResult:
    """What the draws of a seed came to."""

    seed: int
    records: tuple[CellRecord, ...]
    """Of all that was verified, the tries of shrinking among them."""
    found: tuple[CellRecord, ...]
    """The least of each draw that differs."""


@dataclass(frozen=True)
class CurveDistances:
    """A strategy's losses against others, each as largest and mean of the absolute differences."""

    layout: str
    fp32: tuple[float, float]
    """From one rank's in fp32."""
    bf16: tuple[float, float]
    """From one rank's in bf16."""
    cost: tuple[float, float]
    """Of the strategy in bf16 from itself in fp32."""
    last_fp32: float
    last_bf16: float


def read_json_files[T](folder: Path, pattern: str, kind: type[T]) -> list[T]:
    """What the files of a folder hold, one JSON each, by their names' order.

    Raises:
        msgspec.ValidationError: One is not of this version of the kit.
    """
    return [
        msgspec.json.decode(path.read_bytes(), type=kind) for path in sorted(folder.glob(pattern))
    ]


def store_json(folder: Path, name: str, what: object) -> None:
    """Keep a version's curves or draws beside its cells, in place of what was there."""
    write_record(_make_stored_path(folder, name), what)


def store_cells(folder: Path, name: str, records: Iterable[CellRecord]) -> None:
    """Keep the cells of a version, in place of those with the same id; not those of smaller models."""
    path = _make_stored_path(folder, f"{name}.jsonl")
    whole = (one for one in records if not one.more)
    kept = {one.id: one for one in read_stored_cells(path)} | {one.id: one for one in whole}
    lines = (msgspec.json.encode(_encode_record(kept[key])) + b"\n" for key in sorted(kept))
    write_atomically(path, b"".join(lines))


def read_stored_cells(path: Path) -> list[CellRecord]:
    """Cells of a version's file; none where it is not there."""
    lines = path.read_bytes().splitlines() if path.is_file() else ()
    return [msgspec.json.decode(line, type=CellRecord) for line in lines]


def _make_stored_path(folder: Path, name: str) -> Path:
    (folder / STORED).mkdir(parents=True, exist_ok=True)
    return folder / STORED / name


def _encode_record(record: CellRecord) -> dict[str, object]:
    """What is not as it is by default; numbers with as many digits as are read."""
    blank = {one.name: one.default for one in fields(CellRecord)} | {"stages": {}}
    values = {name: getattr(record, name) for name in blank}
    if BF16 not in record.levels:
        del values["stages"]
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in values.items()
        if value != blank[name]
    }
