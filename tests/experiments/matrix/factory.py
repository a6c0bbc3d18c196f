"""Families, strategies and records of tests, all tiny."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from parakit.experiments.matrix.cell import MatrixCell
from parakit.experiments.matrix.definition import Exclusion, Family, Layout, Level, Matrix
from parakit.experiments.matrix.outcome import CellRecord, CellStatus

TP, DP = Layout("tp2", "tp2"), Layout("dp2", "dp2")


def factor(name: str, *levels: str, **fields: object) -> tuple[Level, ...]:
    """Levels with a flag each, but for the first."""
    first, *further = levels
    return (
        Level(name, first),
        *(Level(name, text, (f"--{name}", text), **fields) for text in further),  # type: ignore[arg-type]
    )


def family(*factors: tuple[Level, ...], layouts: tuple[Layout, ...] = (TP, DP)) -> Family:
    """A family of these features."""
    by_name = {levels[0].factor: levels for levels in factors}
    return Family("dense", "gpt2-tiny", by_name, ("--vocab-size", "1024"), layouts=layouts)


def matrix(model_family: Family, *apart: Exclusion) -> Matrix:
    """One family."""
    return Matrix((model_family,), apart)


def record(
    cell: MatrixCell, status: CellStatus = CellStatus.HELD, ratio: float = 0.25, **fields: object
) -> CellRecord:
    """What became of a cell."""
    levels = tuple(level.path for level in cell.levels)
    made = CellRecord(
        cell.id, cell.family.name, cell.layout.name, levels, cell.format_command(), status
    )
    return replace(made, worst_ratio=ratio, megatron="0.19.0", date="2026-11-22", **fields)  # type: ignore[arg-type]


def guilty(*paths: str, layout: str = "tp2") -> Callable[[MatrixCell], CellRecord]:
    """Verifies without Megatron: a cell differs that has all of these levels in the strategy."""

    def verify(cell: MatrixCell) -> CellRecord:
        paths_of_cell = {level.path for level in cell.levels}
        wrong = cell.layout.name == layout and set(paths) <= paths_of_cell
        return record(cell, CellStatus.DIFFERS if wrong else CellStatus.HELD, stage="loss")

    return verify
