"""Running a matrix without Megatron: cells are stored, continued, explained and replaced by covering cells."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from parakit.experiments.matrix.cell import MatrixCell
from parakit.experiments.matrix.cells import choose_cells
from parakit.experiments.matrix.definition import load_matrix
from parakit.experiments.matrix.outcome import (
    CellRecord,
    CellStatus,
    classify_reason,
    read_json_files,
)
from parakit.experiments.matrix.running import CellVerifier, MatrixRun
from parakit.experiments.matrix.table import judge_level
from parakit.launch.options import Options
from parakit.verify.findings import list_findings
from tests.experiments.matrix.factory import DP, TP, factor, family, guilty, matrix, record

MODEL = family(
    factor("norm", "layer", "rms"),
    factor("heads", "mha", "gqa", "mqa"),
    factor("masks", "causal", "eod"),
)
SINKS = "docs/upstream/sink_missing_in_norm.py"
CELLS = choose_cells(matrix(MODEL), MODEL, ())


def run_of(folder: Path, verify, deadline: float | None = None) -> MatrixRun:  # type: ignore[no-untyped-def]
    return MatrixRun(folder, verify, Console(file=io.StringIO()), deadline)


def signs(run: MatrixRun, layout: str) -> dict[str, str]:
    records = list(run.records.values())
    return {
        level.path: judge_level(MODEL, level, layout, records).text
        for levels in MODEL.factors.values()
        for level in levels
    }


def test_wrong_level_is_named_and_the_remaining_levels_are_covered_by_new_cells(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path, guilty("heads/gqa"))
    assert run.run(CELLS)
    tp = signs(run, "tp2")
    assert tp.pop("heads/gqa") == "✗"
    assert set(tp.values()) == {"✓ 0.25"}
    assert set(signs(run, "dp2").values()) == {"✓ 0.25"}


def test_pair_of_levels_that_is_wrong_only_together_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, guilty("heads/gqa", "norm/rms"))
    cell = MatrixCell(
        MODEL, TP, tuple(MODEL.find_level(path) for path in ("norm/rms", "heads/gqa"))
    )
    assert run.run([*CELLS, cell])
    assert run.records[cell.id].blamed == ("norm/rms", "heads/gqa")
    assert signs(run, "tp2")["norm/rms"] == "✗ with gqa"


def test_strategy_that_is_wrong_without_levels_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, guilty())
    assert run.run(CELLS)
    assert set(signs(run, "tp2").values()) == {"✗"}
    assert set(signs(run, "dp2").values()) == {"✓ 0.25"}


def test_matrix_continues_with_the_missing_cells(tmp_path: Path) -> None:
    asked: list[str] = []

    def verify(cell: MatrixCell) -> CellRecord:
        asked.append(cell.id)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return record(cell)

    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, verify).run(CELLS)
    assert len(read_json_files(tmp_path, "*.json", CellRecord)) == 2
    again = run_of(tmp_path, verify)
    assert again.run(CELLS)
    assert len(asked) == len(CELLS) + 1
    assert run_of(tmp_path, verify).records.keys() == {cell.id for cell in CELLS}


def test_no_cell_starts_after_the_deadline(tmp_path: Path) -> None:
    run = run_of(tmp_path, guilty(), deadline=time.monotonic() - 1)
    assert not run.run(CELLS)
    assert not run.records


def test_cause_of_a_known_finding_is_not_searched(tmp_path: Path) -> None:
    asked: list[str] = []

    def verify(cell: MatrixCell) -> CellRecord:
        asked.append(cell.id)
        return record(cell, CellStatus.DIFFERS, finding="sink-missing-in-norm")

    cell = MatrixCell(MODEL, TP, (MODEL.find_level("heads/gqa"), MODEL.find_level("masks/eod")))
    run_of(tmp_path, verify).run([cell])
    assert asked == [cell.id]


def test_model_is_reduced_to_the_smallest_that_is_still_wrong(tmp_path: Path) -> None:
    smaller = (("--num-layers", "2"), ("--num-layers", "1"), ("--hidden-size", "32"))
    model_family = family(factor("norm", "layer", "rms"))
    model_family = msgspec.structs.replace(model_family, smaller=smaller)

    def verify(cell: MatrixCell) -> CellRecord:
        wrong = "rms" in cell.flags and cell.more[-2:] != ("--num-layers", "1")
        return record(cell, CellStatus.DIFFERS if wrong else CellStatus.HELD)

    run = run_of(tmp_path, verify)
    cell = MatrixCell(model_family, TP, (model_family.find_level("norm/rms"),))
    assert run.shrink_model(cell).more == ("--num-layers", "2", "--hidden-size", "32")
    run.run([cell])
    assert "--num-layers 2 --hidden-size 32" in run.records[cell.id].smallest


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("The strategy ended with 1: rank 0: AssertionError: no", CellStatus.REFUSED),
        ("The starting checkpoint was not written: rank 0: ValueError: no", CellStatus.REFUSED),
        (
            "The strategy ended with 1: rank 1: RuntimeError: shape '[2]' is invalid",
            CellStatus.CRASHED,
        ),
        (
            "The strategy ended with 1: rank 0: NotImplementedError: Context parallelism without "
            "Transformer Engine knows plain causal attention.",
            CellStatus.MISSING,
        ),
        ("moe-tiny drops tokens beyond its capacity, so the two differ", CellStatus.NOT_COMPARABLE),
        ("The two runs did different work: dtype is fp32 in one", CellStatus.NOT_COMPARABLE),
    ],
)
def test_sentence_distinguishes_refusals_from_crashes_of_megatron(
    reason: str, status: CellStatus
) -> None:
    assert classify_reason(reason) is status


def test_record_is_read_back_unchanged(tmp_path: Path) -> None:
    stored = record(MatrixCell(MODEL, DP), CellStatus.REFUSED, reason="no", blamed=("norm/rms",))
    run_of(tmp_path, lambda _: stored).get_record(MatrixCell(MODEL, DP))
    assert run_of(tmp_path, guilty()).records == {stored.id: stored}
    assert msgspec.json.decode(msgspec.json.encode(stored), type=CellRecord) == stored


@pytest.mark.parametrize(
    ("patch", "fields", "named"),
    [
        ("", {"status": CellStatus.DIFFERS, "stage": "norm"}, "sink-missing-in-norm"),
        ("", {"status": CellStatus.DIFFERS, "stage": "loss"}, ""),
        (SINKS, {"status": CellStatus.DIFFERS, "stage": "norm"}, ""),
        ("", {"status": CellStatus.HELD}, ""),
        ("", {"status": CellStatus.CRASHED, "reason": "AttributeError: no get_loss_scale"}, "ends"),
        (SINKS, {"status": CellStatus.REFUSED, "reason": "no get_loss_scale"}, "ends"),
        ("", {"status": CellStatus.CRASHED, "reason": "RuntimeError: shape"}, ""),
    ],
)
def test_record_is_assigned_to_the_finding_that_its_patches_do_not_cure(
    patch: str, fields: dict[str, object], named: str
) -> None:
    (sink,) = (finding for finding in list_findings() if finding.id == "sink-missing-in-norm")
    ends = replace(sink, id="ends", fails="no get_loss_scale", stage=None)
    model = load_matrix().families[0]
    cell = MatrixCell(model, TP, (model.find_level("attention/sink"),), patch=patch)
    verifier = CellVerifier(None, Options(), (ends, sink))  # type: ignore[arg-type]
    assert verifier._find_finding(cell, replace(record(cell), **fields)) == named  # type: ignore[arg-type]
