"""Configurations that nobody listed: drawn by a seed, verified, and shrunk where they are wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tools.study.matrix.cell import Cell, patched
from tools.study.matrix.definition import Family, Matrix
from tools.study.matrix.outcome import CellRecord, CellStatus
from tools.study.matrix.running import MatrixRun
from tools.verify.findings import Finding

SHARE = 0.5
"""Of the features that a draw changes; others are as the model has them."""


def draws(
    matrix: Matrix, families: Sequence[Family], known: Sequence[Finding], seed: int
) -> Iterator[Cell]:
    """Legal cells without end, each once; the same for the same seed, and for the first n of any number.

    Args:
        matrix: What is not drawn together.
        families: Of which features and strategies are drawn.
        known: Bugs whose patches are applied where they would be seen.
        seed: Of the draw; weights and samples are the same for all.
    """
    order, seen = random.Random(seed), set[str]()
    while True:
        family = order.choice(families)
        layout = order.choice(family.layouts)
        levels = [
            order.choice(drawn)
            for given in (*family.factors.values(), *family.fuzzed.values())
            if (drawn := [one for one in given[1:] if not one.alone]) and order.random() < SHARE
        ]
        cell = patched(Cell(family, layout, matrix.fitting(family, layout, levels)), known)
        if cell.id not in seen:
            seen.add(cell.id)
            yield cell


def fuzz(run: MatrixRun, cells: Iterator[Cell]) -> Iterator[CellRecord]:
    """Verify draws until the time is over; gives the least of each that differs."""
    while not run.is_over:
        cell = next(cells)
        record = run.record(cell)
        if record.status is CellStatus.DIFFERS and not record.finding:
            smallest = run.shrunk(cell.only(run.blamed(cell, record)))
            yield replace(run.record(smallest), smallest=smallest.command())
