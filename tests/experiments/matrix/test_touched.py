"""Cells that a change can affect, by the files that each strategy and level was recorded to execute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.experiments.matrix.cell import MatrixCell
from parakit.experiments.matrix.touched import (
    RECORDER,
    add_executed_files,
    list_changed_files,
    select_touched_cells,
)
from tests.experiments.matrix.factory import DP, TP, factor, family

MODEL = family(factor("mlp", "dense", "experts"), factor("norm", "layer", "rms"))
PLAIN, EXPERTS = MatrixCell(MODEL, TP), MatrixCell(MODEL, TP, (MODEL.find_level("mlp/experts"),))
NORM, UNKNOWN = MatrixCell(MODEL, TP, (MODEL.find_level("norm/rms"),)), MatrixCell(MODEL, DP)
CELLS = [UNKNOWN, NORM, PLAIN, EXPERTS]
ROUTER = "megatron/core/transformer/moe/router.py"
EXECUTED = {
    "dense": frozenset({"megatron/core/utils.py"}),
    "dense/tp2": frozenset({"megatron/core/tensor_parallel/layers.py"}),
    "dense/mlp/experts": frozenset({"megatron/core/tensor_parallel/layers.py", ROUTER}),
    "dense/norm/rms": frozenset({"megatron/core/fusions/norm.py"}),
}


@pytest.mark.parametrize(
    ("changed", "cells"),
    [
        (ROUTER, [EXPERTS]),
        ("megatron/core/transformer/moe", [EXPERTS]),
        ("megatron/core/*/layers.py", [NORM, PLAIN, EXPERTS]),
        ("megatron/core/fusions/norm.py", [NORM]),
        ("megatron/core", [NORM, EXPERTS, PLAIN]),
        ("megatron/core/utils.py", [NORM, PLAIN, EXPERTS]),
        ("README.md", []),
    ],
)
def test_cells_that_execute_most_changed_files_come_first_and_unrecorded_cells_are_kept(
    changed: str, cells: list[MatrixCell]
) -> None:
    assert select_touched_cells(CELLS, [changed], EXECUTED) == [*cells, UNKNOWN]


def test_files_executed_by_a_whole_family_are_stored_once() -> None:
    first = add_executed_files({}, "dense/tp2", frozenset("ab"))
    assert first == {"dense": frozenset("ab"), "dense/tp2": frozenset()}
    two = add_executed_files(first, "dense/dp2", frozenset("ac"))
    assert two == dict(zip(("dense", "dense/tp2", "dense/dp2"), map(frozenset, "abc"), strict=True))


def test_without_a_recording_every_cell_may_be_touched() -> None:
    assert select_touched_cells(CELLS, [ROUTER], {}) == CELLS


def test_range_of_commits_gives_its_changed_files(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(("git", "-C", str(tmp_path), *identity, *arguments), check=True)

    git("init", "--quiet")
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("")
        git("add", name)
        git("commit", "--quiet", "-m", name)
    assert list_changed_files(["HEAD~1..HEAD", "a.py"], tmp_path) == ["two.py", "a.py"]
    for checkout in (tmp_path, None):
        with pytest.raises(LaunchError, match=r"CHANGED=x\.\.y is no range of commits"):
            list_changed_files(["x..y"], checkout)


def test_rank_records_only_executed_files_of_megatron(tmp_path: Path) -> None:
    package = tmp_path / "megatron"
    package.mkdir()
    (package / "used.py").write_text("def f():\n    return 1\n")
    (package / "imported.py").write_text("def g():\n    return 1\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import megatron.imported
from megatron.used import f
exec(compile(open({str(RECORDER)!r}).read(), "patch", "exec"))
f(), f()
"""
    out = tmp_path / "out"
    out.mkdir()
    environment = {"KIT_EXECUTED": str(out), "PYTHONPATH": str(ROOT)}
    subprocess.run((sys.executable, "-c", code), env=environment, check=True)
    (noted,) = out.iterdir()
    assert noted.read_text() == "megatron/used.py\n"
