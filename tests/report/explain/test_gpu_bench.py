from pathlib import Path

import pytest
from rich.console import Console

from tests.study.bench_gpu.results import bench, result
from tools.records.gpu_bench import FILE, FOLDER, write_bench
from tools.report.build import BuildOptions, build
from tools.report.explain.tables import bench_tables


def test_settings_are_next_to_mark_and_floor() -> None:
    times, kernels = bench_tables(bench(result("published", 438.0, 440.0), result("bf16", 219.0)))
    assert "floor 200 ms (large bf16 product 800 TFLOP/s, large copy 4.00 TB/s)" in times.title
    assert times.lines[0][:7] == (
        *("published", "fp16", "none", "439.0", "438.0, 440.0", "×1.002", "×2.195"),
    )
    assert times.lines[1][5:8] == ("×0.500", "×1.095", "730.6")
    assert times.lines[0][8:10] == ("70.00 GiB", "80.00 GiB")
    assert kernels.lines == (("GEMM", "200.0", "200.0"),)


def test_what_was_left_out_has_its_reason_and_no_figure() -> None:
    (times,) = bench_tables(bench(result("published+norm", reason="no time was left for it")))
    (line,) = times.lines
    assert len(line) == len(times.header)
    assert line[:3] == ("published+norm", "fp16", "norm")
    assert set(line[3:-1]) == {"–"}
    assert line[-1] == "no time was left for it"


def test_no_bench_no_table() -> None:
    assert bench_tables(None) == ()


@pytest.mark.filterwarnings("ignore")
def test_a_report_shows_the_bench_of_its_runs_folder(tmp_path: Path) -> None:
    write_bench(tmp_path / "runs", bench(result("published", 438.0)))
    options = BuildOptions(name="r", runs_root=tmp_path / "runs", reports_root=tmp_path / "reports")
    assert build(options, Console(quiet=True)) == 0
    for name in ("report.md", "report.html"):
        text = (tmp_path / "reports" / "r" / name).read_text()
        assert "GPU bench: gpt2-large on one NVIDIA H200" in text
        assert "×1.000" in text


def test_a_damaged_bench_is_reported_and_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / FOLDER
    folder.mkdir(parents=True)
    (folder / FILE).write_text("{")
    options = BuildOptions(name="r", runs_root=tmp_path / "runs", reports_root=tmp_path / "reports")
    assert build(options, Console(quiet=True)) == 1
    assert "bench-gpu cannot be read" in (tmp_path / "reports" / "r" / "report.md").read_text()
