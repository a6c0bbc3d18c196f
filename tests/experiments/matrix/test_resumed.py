"""The axis of resumed runs: no cell that resumes from a checkpoint differs from an uninterrupted run (slow)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from packaging.version import Version
from rich.console import Console

from parakit.experiments.matrix.cells import choose_cells
from parakit.experiments.matrix.commands import list_known_findings, select_families
from parakit.experiments.matrix.definition import load_matrix
from parakit.experiments.matrix.running import CellVerifier
from parakit.experiments.verify.verifier import ForkedRanks, Verifier
from parakit.launch import SMALL_SAMPLE, Options, find_entry, make_sample

RESUMABLE = {"dp2", "tp2", "pp2", "zero1"}
"""Layouts whose own checkpoints Megatron loads without Transformer Engine."""


def test_the_axis_crosses_savers_optimizers_and_shardings() -> None:
    (resumed,) = select_families(load_matrix(), Version("0.19.2"), ("resumed",))
    savers = {level.resumed for level in resumed.factors["checkpoint"]}
    assert savers == {"1", "baseline", "tp2", "zero1"}
    assert {level.name for level in resumed.factors["optimizer"]} == {
        *("adamw", "muon", "precision-aware"),
    }
    assert {layout.name for layout in resumed.layouts} == RESUMABLE | {"zero2", "zero3", "fsdp2"}


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_no_cell_that_resumes_differs(tmp_path: Path) -> None:
    release = find_entry(None).megatron_version
    matrix = load_matrix().select_release(Version(release))
    (resumed,) = select_families(matrix, Version(release), ("resumed",))
    known = list_known_findings(release)
    make_sample(SMALL_SAMPLE, Console(quiet=True))
    with closing(ForkedRanks()) as ranks:
        verify = CellVerifier(Verifier(tmp_path, ranks), Options(), known)
        records = [verify(cell) for cell in choose_cells(matrix, resumed, known)]
    wrong = [record.sentence for record in records if record.is_wrong]
    assert not wrong
    as_it_is = {record.layout for record in records if record.is_right and not record.levels}
    assert as_it_is >= RESUMABLE
