"""Sweeps as job arrays, with fake Slurm commands."""

import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord, read_run
from parakit.cluster.slurm import Slurm
from parakit.config.errors import LaunchError
from parakit.config.flags import drop_flags
from parakit.config.run import RuntimeName
from parakit.experiments.engine import run_experiment
from parakit.experiments.runner import find_runs_finished_in_slurm
from parakit.experiments.tables.sweep import OUTPUT
from parakit.launch.compose import Launch, ResumePoint
from parakit.launch.job import parse_target
from parakit.launch.options import Options, options_from_texts
from parakit.launch.run_folder import create_run_folder
from parakit.launch.train import compose_job
from tests.cluster.conftest import program, run_folders
from tests.given import swept

START = ("--load", "--finetune", "--no-load-optim", "--no-load-rng")


@pytest.fixture
def options(sample_prefix: Path, tmp_path: Path) -> Options:
    return Options(data=str(sample_prefix), runs=tmp_path / "runs", slurm=Slurm(nodes=2))


def axes(**variables: str) -> dict[str, str]:
    return {"MODELS": "gpt2-tiny", **variables}


def first_launch(request: dict[str, str], options: Options) -> Launch:
    """Return the launch of the baseline, which exists for every number of devices used here."""
    return compose_job(swept(request, options).cells[0].job)


def sweep(request: dict[str, str], options: Options) -> None:
    console, reports = Console(file=io.StringIO()), options.runs.parent / "reports"
    run_experiment(swept(request, options), OUTPUT, console, reports)


def jobs(runs: Path) -> dict[str, str]:
    """Return the job number by run folder, without the time in the folder's name."""
    jobs_by_folder = {}
    for folder in run_folders(runs):
        jobs_by_folder[folder.name] = json.loads((folder / "job.json").read_text())["job_id"]
    return jobs_by_folder


def test_cells_of_equal_size_form_an_array_and_baselines_use_a_single_node(
    programs: Path, options: Options
) -> None:
    program(
        programs,
        "sbatch",
        f'n=$(ls {programs}/submitted-* 2> /dev/null | wc -l); cp "${{@: -1}}" '
        f"{programs}/submitted-$n; echo 1$n",
    )
    sweep(axes(), options)
    alone, spread = sorted(programs.glob("submitted-*"))
    for path, nodes in ((alone, 1), (spread, 2)):
        text = path.read_text()
        assert f"--nodes={nodes}" in text
        assert "--array=0-1" in text  # Megatron and plain PyTorch
        assert text.count("BACKEND=native") == 1
        assert "ITERS=25" in text
    assert sorted(jobs(options.runs).values()) == ["10_0", "10_1", "11_0", "11_1"]


def test_repeated_sweep_submits_only_cells_without_run_or_job(
    programs: Path, options: Options
) -> None:
    single_cell = axes(DEVICES="1cpu")
    sweep(single_cell, options)
    first = run_folders(options.runs)
    assert len(first) == 2
    made, failed = first
    write_record(made / "status.json", StatusRecord(Status.OK, 0, ""))
    write_record(failed / "status.json", StatusRecord(Status.CRASHED, 1, "Why."))
    sweep(single_cell, options)
    (again,) = set(run_folders(options.runs)) - set(first)
    assert jobs(options.runs)[again.name] == "12"  # a single cell is no array
    program(programs, "squeue", "echo '12|PENDING|Priority'")
    sweep(single_cell, options)
    assert len(run_folders(options.runs)) == 3


def test_sweep_without_slurm_leaves_no_files(programs: Path, options: Options) -> None:
    program(programs, "sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1")
    with pytest.raises(LaunchError, match="Slurm refuses the job"):
        sweep(axes(), options)
    assert run_folders(options.runs) == []


def ended(folder: Path, status: Status = Status.OK) -> None:
    write_record(folder / "status.json", StatusRecord(status, 0, ""))


def test_array_elements_get_the_variables_of_the_sweep(
    programs: Path, options: Options, sample_prefix: Path
) -> None:
    variables = {
        "SAVE_EVERY": "10",
        "KEEP": "3",
        "HANG_TIMEOUT": "60",
        "WANDB": "1",
        "FUSED": "norm",
    }
    places = {"LAUNCHER": "slurm", "DATA": str(sample_prefix), "RUNS": str(options.runs)}
    request = axes(DEVICES="1cpu", BACKENDS="megatron")
    asked = options_from_texts({**places, **variables, "REPEATS": "2", "IMAGE": "26.02-py3"})
    sweep(request, asked)
    folders = run_folders(options.runs)
    (line, again) = re.findall("export (.*RUN_FOLDER.*)", (programs / "submitted").read_text())
    got = dict(word.split("=", 1) for word in shlex.split(line))
    assert {"RUN_FOLDER", "RUNTIME"} < set(got)
    assert not {"REPEATS", "DRY_RUN", "IMAGE", "LAUNCHER"} & set(got)
    element_options, target = options_from_texts(got), parse_target("train-baseline-gpt2-tiny-1cpu")
    launch = compose_job(target.with_options(element_options))
    assert launch.arguments(str(folders[0])) == read_run(folders[0]).argv
    assert launch.saving == asked.saving
    assert launch.job.options.hang_timeout_seconds == 60
    assert launch.environment["KIT_FUSED"] == "norm"
    assert len(folders) == len((line, again))


def test_requeued_array_element_counts_for_its_cell(programs: Path, options: Options) -> None:
    options = options_from_texts(
        {
            **{"LAUNCHER": "slurm", "SAVE_EVERY": "10"},
            **{"DATA": str(options.data), "RUNS": str(options.runs)},
        }
    )
    single_cell = axes(DEVICES="1cpu", BACKENDS="megatron")
    sweep(single_cell, options)
    (folder,) = run_folders(options.runs)
    launch = first_launch(single_cell, options)
    create_run_folder(launch, options.runs, folder)  # the first attempt
    loaded = ResumePoint(folder.name, folder / "checkpoints", 10)
    again = replace(launch, flags=drop_flags(launch.flags, START), resume_point=loaded)
    other_node = {**launch.environment, "GLOO_SOCKET_IFNAME": "eth1"}
    again = replace(again, environment=other_node)
    create_run_folder(again, options.runs, folder)
    assert read_run(folder).argv != launch.arguments(str(folder))
    ended(folder)
    assert find_runs_finished_in_slurm(launch) == [folder]
    sweep(single_cell, options)
    assert run_folders(options.runs) == [folder]


def test_cells_composed_on_nodes_with_other_hardware_are_recognised(
    programs: Path, options: Options
) -> None:
    request = axes(DEVICES="1gpu", BACKENDS="megatron")
    sweep(request, options)
    (folder,) = run_folders(options.runs)
    launch = first_launch(request, options)
    entry = replace(
        launch.entry, path="/opt/megatron-lm/pretrain_gpt.py", megatron_version="0.16.0"
    )
    flags = drop_flags(launch.flags, ("--no-persist-layer-norm", "--transformer-impl"))
    composed = replace(launch, entry=entry, flags=flags)
    create_run_folder(composed, options.runs, folder)
    assert read_run(folder).argv != launch.arguments(str(folder))
    program(programs, "squeue", "echo '12|RUNNING|None'")
    sweep(request, options)
    assert run_folders(options.runs) == [folder]
    program(programs, "squeue", "exit 0")
    ended(folder)
    assert find_runs_finished_in_slurm(launch) == [folder]


@pytest.mark.parametrize(
    "changes",
    [
        {"slurm": Slurm(image="another.sqsh")},
        {"runtime": RuntimeName.HOST},
        {"fused": ("norm",)},
        {"share_gpu": True},
        {"iterations": 30},
    ],
)
def test_cell_with_other_arguments_is_another_cell(
    programs: Path, options: Options, changes: dict[str, object]
) -> None:
    request = axes(DEVICES="1gpu", BACKENDS="megatron")
    sweep(request, options)
    (folder,) = run_folders(options.runs)
    ended(folder)
    asked = replace(options, **changes)  # type: ignore[arg-type]
    assert find_runs_finished_in_slurm(first_launch(request, options)) == [folder]
    assert find_runs_finished_in_slurm(first_launch(request, asked)) == []


def test_nothing_is_submitted_twice_while_slurm_does_not_answer(
    programs: Path, options: Options
) -> None:
    single_cell = axes(DEVICES="1cpu")
    sweep(single_cell, options)
    program(programs, "squeue", "exit 1")
    with pytest.raises(LaunchError, match="squeue gives no answer"):
        sweep(single_cell, options)
    assert len(run_folders(options.runs)) == 2
