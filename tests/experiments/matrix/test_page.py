"""Pages of the matrix from stored cells."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

from parakit.experiments.matrix.cell import MatrixCell
from parakit.experiments.matrix.curves import measure_distances
from parakit.experiments.matrix.outcome import (
    CellStatus,
    FuzzResult,
    StageError,
    store_cells,
    store_json,
)
from parakit.experiments.matrix.page import (
    HTML,
    MARKDOWN,
    write_pages,
)
from parakit.experiments.matrix.table import compute_bf16_costs
from tests.experiments.matrix.factory import DP, TP, factor, family, matrix, record

MODEL = family(factor("dtype", "fp32", "bf16"), factor("attention", "full", "sink"))
SINK, HALF = MODEL.find_level("attention/sink"), MODEL.find_level("dtype/bf16")
RECORDS = [
    record(MatrixCell(MODEL, TP)),
    record(MatrixCell(MODEL, DP), ratio=0.5),
    record(
        MatrixCell(MODEL, TP, (SINK,)),
        CellStatus.DIFFERS,
        stage="norm",
        module="decoder.layers.0",
        kind="not counted",
        finding="sink-missing-in-norm",
    ),
    record(MatrixCell(MODEL, TP, (HALF,)), stages={"outputs": StageError(2.0**-8, 0.5)}),
    record(
        MatrixCell(MODEL, DP, (HALF,)),
        CellStatus.CRASHED,
        reason="RuntimeError: <no>",
        blamed=("dtype/bf16",),
    ),
]


def pages(folder: Path, *records) -> tuple[str, str]:  # type: ignore[no-untyped-def]
    store_cells(folder, "0.19.0", records)
    write_pages(folder, matrix(MODEL))
    return (folder / MARKDOWN).read_text(), (folder / HTML).read_text()


def test_a_pair_links_to_its_cell_and_the_cell_has_its_command(tmp_path: Path) -> None:
    markdown, html = pages(tmp_path, *RECORDS)
    wrong = RECORDS[2]
    assert "| attention | full | ✓ 0.25 | ✓ 0.50 |" in markdown
    assert f"|  | sink | [✗]({HTML}#0.19.0.{wrong.id}) | – |" in markdown
    assert f'href="#0.19.0.{RECORDS[1].id}"' in html
    assert f'id="0.19.0.{wrong.id}"' in html
    assert "--softmax-type learnable" in html  # This is the command of the finding.
    assert "RuntimeError: &lt;no&gt;" in html
    assert "5 cells: 3 held, 1 crashed, 1 differs." in markdown
    assert "families | cells | pairs | held | crashed | differs | in no cell |" in markdown
    assert f"| {MODEL.name} | 5 | 8 | 5 | 1 | 1 | 1 |" in markdown
    assert "<no>" not in html


def test_difference_is_listed_with_its_finding_and_a_new_difference_as_not_judged(
    tmp_path: Path,
) -> None:
    new = record(
        MatrixCell(MODEL, DP, (SINK,)), CellStatus.DIFFERS, stage="loss", blamed=("attention/sink",)
    )
    markdown, _ = pages(tmp_path, *RECORDS, new)
    assert "(sink-missing-in-norm). Seen in dense in tp2;" in markdown
    assert "Not judged yet: dense dp2, attention/sink" in markdown
    assert new.command in markdown


def test_newest_version_is_the_first_on_the_page(tmp_path: Path) -> None:
    for name in ("0.9.0", "f4fa7d6b", "0.19.0"):
        store_cells(tmp_path, name, RECORDS)
    markdown = write_pages(tmp_path, matrix(MODEL))[0].read_text()
    places = [markdown.index(f"\n## {name}\n") for name in ("0.19.0", "0.9.0", "f4fa7d6b")]
    assert places == sorted(places)


def test_losses_in_bf16_are_compared_with_one_rank_and_with_fp32(tmp_path: Path) -> None:
    one_rank = {"fp32": [2.0, 1.0], "bf16": [2.0, 1.5]}
    curve = measure_distances("tp2", one_rank, {"fp32": [2.0, 1.25], "bf16": [2.5, 1.5]})
    assert (curve.fp32, curve.bf16, curve.cost) == ((0.25, 0.125), (0.5, 0.25), (0.5, 0.375))
    store_json(tmp_path, "0.19.0.bf16.json", [curve])
    markdown, _ = pages(tmp_path, *RECORDS)
    assert "| tp2 | 0.25, 0.12 | 0.5, 0.25 | 0.5, 0.38 | 1.25, 1.5 |" in markdown


def test_bf16_column_is_the_largest_error_relative_to_rounding() -> None:
    assert compute_bf16_costs(RECORDS, ["tp2", "dp2"]) == {"outputs": [1.0, None]}


def test_random_cells_are_counted_and_differences_and_failures_are_listed(tmp_path: Path) -> None:
    held, failed = RECORDS[0], RECORDS[4]
    wrong = record(
        MatrixCell(MODEL, DP, (SINK,)), CellStatus.DIFFERS, stage="loss", smallest="make verify-dp2"
    )
    store_json(tmp_path, "0.19.0.fuzz-7.json", FuzzResult(7, (held, failed, wrong), (wrong,)))
    markdown, _ = pages(tmp_path, *RECORDS)
    counts = "3 verified: 1 held, 1 crashed, 1 differs. 1 that no finding explains."
    assert f"`make verify-fuzz SEED=7`, 2026-11-22: {counts}" in markdown
    assert "\n    make verify-dp2\n" in markdown
    assert "- dense, dtype/bf16, in dp2: crashed: RuntimeError: &lt;no&gt;" in markdown


def test_levels_that_a_version_does_not_know_are_in_no_row(tmp_path: Path) -> None:
    newer = family(factor("optimizer", "adamw", "muon", since=Version("0.20")))
    store_cells(tmp_path, "0.19.0", [record(MatrixCell(newer, TP))])
    write_pages(tmp_path, matrix(newer))
    markdown = (tmp_path / MARKDOWN).read_text()
    assert "| optimizer | adamw | ✓ 0.25 |" in markdown
    assert "| muon |" not in markdown
