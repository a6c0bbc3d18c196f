"""What became of a cell: one JSON each, `<folder>/<id>.json`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np

from tools.records.io import write_record
from tools.records.verdict import Outcome
from tools.verify.verdict import Judgement


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


STATUSES = list(CellStatus)
_EXCEPTION = re.compile(r"\b(\w+(?:Error|Exception|Exit))\b")
_REFUSING = ("AssertionError", "ValueError", "NotImplementedError")
_ABSENT = re.compile(
    r"without Transformer Engine|Transformer ?Engine|\bTE\b|CUDA|Apex|apex|NVML|NCCL|grouped.gemm",
)


@dataclass(frozen=True)
class Error:
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
    stages: Mapping[str, Error] = field(default_factory=dict)
    seconds: float = 0.0
    date: str = ""
    megatron: str = ""
    """Version, and commit of a checkout."""
    kit: str = ""
    """Commit."""
    blamed: tuple[str, ...] | None = None
    """The fewest levels that are as wrong; empty: the layout by itself. None: not looked for."""
    smallest: str = ""
    """The command of the smallest cell that still differs."""
    finding: str = ""
    """The known finding that this is."""
    more: tuple[str, ...] = ()
    """Further flags, of a smaller model: no cell of the tables."""
    patch: str = ""
    """Plants that cured known findings here."""

    @property
    def is_right(self) -> bool:
        """Whether all was compared and held."""
        return self.status is CellStatus.HELD

    @property
    def sentence(self) -> str:
        """In a few words."""
        if self.status is CellStatus.DIFFERS:
            return f"{self.stage}, {self.module}: {self.kind}"
        if self.status is CellStatus.HELD:
            return f"{self.worst_ratio or 0:.2f} of its tolerance"
        return self.reason or ""


def status_of(judgement: Judgement) -> CellStatus:
    """What a judgement is, without a second try."""
    verdict = judgement.verdict
    if verdict.verdict is Outcome.HELD:
        return CellStatus.HELD
    if verdict.verdict is Outcome.DIFFERS:
        return CellStatus.DIFFERS
    return status_of_reason(verdict.reason or "")


def status_of_reason(reason: str) -> CellStatus:
    """What a sentence means by which a run, or a comparison, did not happen."""
    if "ended with" not in reason and "was not written" not in reason:
        return CellStatus.NOT_COMPARABLE
    if _ABSENT.search(reason):
        return CellStatus.MISSING
    named = _EXCEPTION.search(reason)
    if named is None:
        said = any(word in reason for word in (" error: ", "usage: "))
        return CellStatus.REFUSED if said else CellStatus.CRASHED
    return CellStatus.REFUSED if named[1] in _REFUSING else CellStatus.CRASHED


def stages_of(judgement: Judgement) -> dict[str, Error]:
    """The largest error of each stage, by name, in their order; those that are finite."""
    found: dict[str, Error] = {}
    for one in judgement.compared.comparisons if judgement.compared else ():
        name = str(one.key[0])
        before = found.get(name, Error(0.0, 0.0))
        if np.isfinite(one.error) and np.isfinite(one.ratio):
            found[name] = Error(max(before.error, one.error), max(before.ratio, one.ratio))
    return found


def read_cells(folder: Path) -> dict[str, CellRecord]:
    """Cells in a folder, by id.

    Raises:
        msgspec.ValidationError: One is not of this version of the kit.
    """
    return {one.id: one for one in _read(sorted(folder.glob("*.json")))}


def _read(paths: Iterable[Path]) -> Iterator[CellRecord]:
    for path in paths:
        yield msgspec.json.decode(path.read_bytes(), type=CellRecord)


def write_cell(folder: Path, record: CellRecord) -> None:
    """Write a cell, whole or not at all."""
    write_record(folder / f"{record.id}.json", record)
