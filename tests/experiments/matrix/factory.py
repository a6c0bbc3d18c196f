"""Factory of tiny families, strategies and records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from parakit.experiments.matrix.cell import MatrixCell
from parakit.experiments.matrix.definition import Exclusion, Family, Layout, Level, Matrix
from parakit.experiments.matrix.outcome import CellRecord, CellStatus

TP, DP = Layout("tp2", "tp2"), Layout("dp2", "dp2")


def factor(name: str, *levels: str, **fields: object) -> tuple[Level, ...]:
    """Return levels of a factor. Every level but the first has a flag."""
    first, *further = levels
    return (
        Level(name, first),
        *(Level(name, text, (f"--{name}", text), **fields) for text in further),  # type: ignore[arg-type]
    )


def family(*factors: tuple[Level, ...], layouts: tuple[Layout, ...] = (TP, DP)) -> Family:
    """Return a family with these factors."""
    by_name = {levels[0].factor: levels for levels in factors}
    return Family("dense", "gpt2-tiny", by_name, ("--vocab-size", "1024"), layouts=layouts)


def matrix(model_family: Family, *apart: Exclusion) -> Matrix:
    """Return a matrix of a single family."""
    return Matrix((model_family,), apart)


def record(
    cell: MatrixCell, status: CellStatus = CellStatus.HELD, ratio: float = 0.25, **fields: object
) -> CellRecord:
    """Return the record of a cell with a status."""
    levels = tuple(level.path for level in cell.levels)
    made = CellRecord(
        cell.id, cell.family.name, cell.layout.name, levels, cell.format_command(), status
    )
    return replace(made, worst_ratio=ratio, megatron="0.19.0", date="2026-11-22", **fields)  # type: ignore[arg-type]


def guilty(*paths: str, layout: str = "tp2") -> Callable[[MatrixCell], CellRecord]:
    """Return a fake verifier: a cell differs if its strategy has all of these levels."""

    def verify(cell: MatrixCell) -> CellRecord:
        paths_of_cell = {level.path for level in cell.levels}
        wrong = cell.layout.name == layout and set(paths) <= paths_of_cell
        return record(cell, CellStatus.DIFFERS if wrong else CellStatus.HELD, stage="loss")

    return verify
