"""Stored cells of a version."""

from __future__ import annotations

from pathlib import Path

from parakit.experiments.matrix.cell import MatrixCell
from parakit.experiments.matrix.outcome import read_stored_cells, store_cells
from tests.experiments.matrix.factory import DP, TP, factor, family, record

MODEL = family(factor("dtype", "fp32", "bf16"))


def test_cells_are_stored_by_version_and_replaced_by_id(tmp_path: Path) -> None:
    store_cells(tmp_path, "0.19.0", [record(MatrixCell(MODEL, TP)), record(MatrixCell(MODEL, DP))])
    other = record(MatrixCell(MODEL, TP), ratio=0.75)
    smaller = record(MatrixCell(MODEL, TP, more=("--num-layers", "1")), more=("--num-layers", "1"))
    store_cells(tmp_path, "0.19.0", [other, smaller])
    stored = {
        record.id: record for record in read_stored_cells(tmp_path / "parity" / "0.19.0.jsonl")
    }
    assert len(stored) == 2
    assert stored[other.id] == other
