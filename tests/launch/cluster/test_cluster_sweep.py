"""A sweep as job arrays, with stand-ins for Slurm's commands."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.launch.cluster.conftest import program, run_folders
from tools.launch.cluster.slurm import Slurm
from tools.launch.errors import LaunchError
from tools.launch.options import Options
from tools.launch.sweep import run as module
from tools.launch.sweep.request import Request, request_from_environment
from tools.records import Status, StatusRecord, write_record


@pytest.fixture
def options(sample_prefix: Path, tmp_path: Path) -> Options:
    return Options(data=str(sample_prefix), runs=tmp_path / "runs", slurm=Slurm(nodes=2))


@pytest.fixture
def request_() -> Request:
    return request_from_environment({"MODELS": "gpt2-tiny"})


def sweep(request: Request, options: Options) -> str:
    text = io.StringIO()
    module.sweep(request, options, Console(file=text, width=400), options.runs.parent / "reports")
    return text.getvalue()


def jobs(runs: Path) -> dict[str, str]:
    """Job by run folder, without the folder's time."""
    found = {}
    for folder in run_folders(runs):
        found[folder.name] = json.loads((folder / "job.json").read_text())["job_id"]
    return found


def test_cells_of_one_size_are_one_array_and_baselines_take_one_node(
    programs: Path, request_: Request, options: Options
) -> None:
    program(
        programs,
        "sbatch",
        f'n=$(ls {programs}/submitted-* 2> /dev/null | wc -l); cp "${{@: -1}}" '
        f"{programs}/submitted-$n; echo 1$n",
    )
    sweep(request_, options)
    alone, spread = sorted(programs.glob("submitted-*"))
    for path, nodes in ((alone, 1), (spread, 2)):
        text = path.read_text()
        assert f"--nodes={nodes}" in text
        assert "--array=0-1" in text  # Megatron and plain PyTorch
        assert text.count("BACKEND=native") == 1
        assert "ITERS=25" in text
    assert sorted(jobs(options.runs).values()) == ["10_0", "10_1", "11_0", "11_1"]


def test_going_on_submits_what_is_neither_made_nor_on_its_way(
    programs: Path, request_: Request, options: Options
) -> None:
    one = replace(request_, devices=request_.devices[:1])
    sweep(one, options)
    first = run_folders(options.runs)
    assert len(first) == 2
    made, failed = first
    write_record(made / "status.json", StatusRecord(Status.OK, 0, ""))
    write_record(failed / "status.json", StatusRecord(Status.CRASHED, 1, "Why."))
    sweep(one, options)
    (again,) = set(run_folders(options.runs)) - set(first)
    assert jobs(options.runs)[again.name] == "12"  # a single cell is no array
    program(programs, "squeue", "echo '12|PENDING|Priority'")
    sweep(one, options)
    assert len(run_folders(options.runs)) == 3


def test_without_slurm_nothing_is_left_behind(
    programs: Path, request_: Request, options: Options
) -> None:
    program(programs, "sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1")
    with pytest.raises(LaunchError, match="Slurm refuses the job"):
        sweep(request_, options)
    assert run_folders(options.runs) == []
