"""The notebooks run from the first cell to the last, in a separate process or in a kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parakit.config.files import ROOT
from tests.patience import OF_A_RUN

NOTEBOOK = ROOT / "examples/notebooks/parakit.ipynb"
FIRST_MINUTES = NOTEBOOK.with_name("first_minutes.ipynb")


def read_cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return cells


def test_outputs_contain_no_absolute_paths() -> None:
    text = json.dumps([cell.get("outputs") for cell in read_cells()])
    for folder in (str(ROOT), str(Path.home()), "/tmp/", "site-packages"):
        assert folder not in text


def test_the_notebook_calls_every_public_function() -> None:
    import parakit

    code = "".join("".join(cell["source"]) for cell in read_cells() if cell["cell_type"] == "code")
    assert [name for name in parakit.__all__ if f"parakit.{name}(" not in code] == []


def test_the_cells_run_in_order(tmp_path: Path) -> None:
    """The last expression of each cell is rendered like in a notebook: as HTML, or by its `repr`."""
    program = tmp_path / "cells.py"
    program.write_text(RUN_CELLS, encoding="utf-8")
    ended = subprocess.run(
        (sys.executable, str(program), str(NOTEBOOK)),
        cwd=NOTEBOOK.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=OF_A_RUN,
    )
    assert ended.returncode == 0, ended.stderr
    assert "sp2dp4-zero1" in ended.stdout
    assert "tp2.log: ok, 25 iterations" in ended.stdout
    assert "Rank 2 is in data loading" in ended.stdout
    assert "differs | reduced gradients | " in ended.stdout


def test_the_first_minutes_need_no_address_in_a_clone_and_have_no_outputs() -> None:
    cells = json.loads(FIRST_MINUTES.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert 'REPOSITORY = ""' in code[0]
    assert all(not cell.get("outputs") for cell in cells)


@pytest.mark.slow
def test_the_first_minutes_train_two_strategies_draw_them_and_find_the_injected_bug() -> None:
    pytest.importorskip("ipykernel")
    nbformat, nbclient = map(pytest.importorskip, ("nbformat", "nbclient"))
    notebook = nbformat.read(FIRST_MINUTES, as_version=4)
    resources = {"metadata": {"path": str(FIRST_MINUTES.parent)}}
    nbclient.NotebookClient(notebook, timeout=2 * OF_A_RUN, resources=resources).execute()
    code = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    texts = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in code]
    assert "dp2" in texts[1]
    assert "tp2" in texts[1]
    shown = [output["data"] for output in code[2]["outputs"] if "data" in output]
    assert "<iframe srcdoc=" in shown[0]["text/html"]
    assert "differs at: outputs, embedding.word_embeddings (output)" in texts[3]


@pytest.mark.ranks
def test_a_kernel_executes_the_notebook() -> None:
    pytest.importorskip("ipykernel")
    nbformat, nbclient = map(pytest.importorskip, ("nbformat", "nbclient"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=OF_A_RUN, resources=resources).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not any(output["output_type"] == "display_data" for output in shown)
    assert any("text/html" in output.get("data", {}) for output in shown)


RUN_CELLS = """
import ast, json, sys
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        tree = ast.parse("".join(cell["source"]))
        *body, last = tree.body
        if not isinstance(last, ast.Expr):
            body.append(last)
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            print(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
"""
