from dataclasses import replace
from pathlib import Path

import pytest

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord
from parakit.experiments.runner import find_finished_runs
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.run_folder import create_run_folder
from parakit.launch.train import compose_job


@pytest.mark.parametrize(
    ("trained", "asked", "is_same_run"),
    [
        ("zero1", "dp2-zero1", True),
        ("dp2-zero1", "zero1", True),
        ("vpp2", "vpp2x2", True),
        ("dp2", "zero1", False),
    ],
)
def test_finished_run_is_recognised_by_its_content_instead_of_its_folder_name(
    trained: str, asked: str, is_same_run: bool, sample_prefix: Path, tmp_path: Path
) -> None:
    options = Options(data=str(sample_prefix), runs=tmp_path / "runs")
    targets = [parse_target(f"train-{name}-gpt2-tiny-2cpu") for name in (trained, asked)]
    made, wanted = (compose_job(t.with_options(options)) for t in targets)
    folder = create_run_folder(made, options.runs)
    write_record(folder / records.STATUS_FILE, StatusRecord(Status.OK, 0))
    assert find_finished_runs(wanted) == ([folder] if is_same_run else [])


def test_run_of_an_edited_megatron_does_not_count_as_finished(
    sample_prefix: Path, tmp_path: Path
) -> None:
    target = parse_target("train-dp2-gpt2-tiny-2cpu")
    options = Options(data=str(sample_prefix), runs=tmp_path / "runs")
    launch = compose_job(target.with_options(options))
    folder = create_run_folder(launch, options.runs)
    write_record(folder / records.STATUS_FILE, StatusRecord(Status.OK, 0))
    record = records.read_run(folder)
    assert record.code is not None
    records.write_run(folder, replace(record, code=replace(record.code, kit="edited")))
    assert find_finished_runs(launch) == [folder]
    records.write_run(folder, replace(record, code=replace(record.code, megatron="edited")))
    assert find_finished_runs(launch) == []
