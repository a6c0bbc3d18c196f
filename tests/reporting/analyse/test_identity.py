"""Rows are of what was trained: how a run is split decides, not what its strategy was called."""

from dataclasses import replace
from pathlib import Path

from parakit.artifacts.run import RunRecord
from parakit.config.published import load_published
from parakit.config.run import PatchFile
from parakit.config.strategy import Parallelism, Sharding, strategy_flags
from parakit.logs.runs import Run, load_folder, load_log
from parakit.reporting.analyse.configurations import build_row_identity, group_into_rows, label_rows
from parakit.reporting.analyse.published import find_published_figure
from tests.reporting.factory import changed, log_text, run_record, write_run
from tests.reporting.read.test_runs import ARGUMENTS
from tests.reporting.render.test_build import made

TIMES = [9.0, *[8.0] * 7]


def sharded(name: str, strategy: str) -> RunRecord:
    split = Parallelism(data=2, sharding=Sharding.ZERO1)
    record = run_record(name, "dp2")
    argv = (*record.argv, *strategy_flags(split))
    return changed(record, parallelism=split, strategy=strategy, argv=argv)


def of_log(folder: Path, **arguments: str) -> Run:
    text = ARGUMENTS
    for name, value in arguments.items():
        kept = [line for line in text.splitlines() if line.split()[0] != name]
        line = f"  {name} ".ljust(51, ".") + f" {value}"
        text = "\n".join([kept[0], line, *kept[1:], ""])
    path = folder / "foreign.log"
    path.write_text(text + log_text(TIMES))
    return load_log(path)[0]


def test_two_names_of_one_split_are_one_row(tmp_path: Path) -> None:
    names = {"a": "zero1", "b": "dp2-zero1"}
    runs = [
        load_folder(write_run(tmp_path, sharded(name, strategy), log_text(TIMES)))
        for name, strategy in names.items()
    ]
    (row,) = group_into_rows(runs)
    assert [run.name for run in row.runs] == ["a", "b"]


def test_a_run_with_a_patch_file_is_a_row_of_its_own_that_names_it(tmp_path: Path) -> None:
    patched = run_record("b", patch_file=PatchFile("bugs/x.py", "1a2b3c4d5e"))
    runs = [
        load_folder(write_run(tmp_path, record, log_text(TIMES)))
        for record in (run_record("a"), patched)
    ]
    rows = group_into_rows(runs)
    assert [len(row.runs) for row in rows] == [1, 1]
    assert label_rows(rows) == ["baseline ×1", "baseline ×1 with PATCH_FILE=bugs/x.py"]


def test_a_log_of_zero1_has_the_grammars_one_name(tmp_path: Path) -> None:
    run = of_log(
        tmp_path,
        tensor_model_parallel_size="1",
        data_parallel_size="2",
        use_distributed_optimizer="True",
    )
    assert run.strategy == "dp2-zero1"


def test_three_virtual_stages_are_named_as_three(tmp_path: Path) -> None:
    run = of_log(
        tmp_path,
        tensor_model_parallel_size="1",
        pipeline_model_parallel_size="2",
        virtual_pipeline_model_parallel_size="3",
    )
    assert run.strategy == "vpp2x3"


def test_an_earlier_report_knows_a_row_by_what_was_trained(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", sharded("a", "zero1"), log_text([8.0] * 25))
    made(tmp_path, name="old")
    for path in sorted((tmp_path / "runs" / "a").iterdir()):
        path.unlink()
    (tmp_path / "runs" / "a").rmdir()
    write_run(tmp_path / "runs", sharded("b", "dp2-zero1"), log_text([8.0] * 25))
    code, text, _ = made(tmp_path, baseline=tmp_path / "reports" / "old", strict=True)
    assert code == 0
    assert "nothing changed" in " ".join(text.split())  # A long path wraps the line.


def test_another_recomputation_is_not_the_earlier_row(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", run_record("a"), log_text([8.0] * 25))
    made(tmp_path, name="old")
    (tmp_path / "runs" / "a").rename(tmp_path / "away")
    argv = (*run_record("b").argv, "--recompute-granularity", "selective")
    write_run(tmp_path / "runs", run_record("b", argv=argv), log_text([8.0] * 25))
    code, text, _ = made(tmp_path, 200, baseline=tmp_path / "reports" / "old", strict=True)
    assert code == 1
    assert "missing" in text


def test_repeats_of_other_seeds_are_one_identity_and_other_devices_are_not(tmp_path: Path) -> None:
    run = load_folder(write_run(tmp_path, run_record("a"), log_text(TIMES)))
    assert run.spec is not None
    again = replace(run, name="b", spec=replace(run.spec, seed=7, strategy="dp1"))
    assert build_row_identity(run) == build_row_identity(again)
    assert build_row_identity(run) != build_row_identity(replace(run, device="NVIDIA H200"))


def test_a_published_figure_is_found_by_how_its_run_was_split(tmp_path: Path) -> None:
    record = changed(sharded("a", "dp2-zero1"), model="gpt3-64m")
    run = load_folder(write_run(tmp_path, record, log_text(TIMES)))
    figure = find_published_figure(run, load_published())
    assert figure is not None
    assert figure.strategy == "zero1"
