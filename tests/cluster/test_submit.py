"""Submission with a fake sbatch, and `make status` with a fake squeue."""

import io
import json
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest

from parakit.artifacts.io import write_record
from parakit.artifacts.run import JobRecord, Status, StatusRecord, read_status, write_run
from parakit.cli.dispatch import run_target
from parakit.cluster.sbatch import ArrayTask, BatchJob
from parakit.cluster.slurm import JobState, Slurm, query_job_states
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.run import DeviceKind
from parakit.launch.status import read_run_statuses
from parakit.launch.submit import _write_and_submit
from tests.cluster.conftest import program, run_folders
from tests.reporting.factory import run_record

ITERATION = (
    " iteration {:8d}/     500 | consumed samples:           16 | elapsed time per iteration (ms): "
    "500.0 | learning rate: 4.0E-04 | global batch size:     8 | lm loss: 1.075875E+01 | "
    "loss scale: 1.0 | grad norm: 3.123 | number of skipped iterations:   0 | number of nan "
    "iterations:   0 |\n"
)
KEY = "s3cret-wandb-key"


@dataclass(frozen=True)
class Submitted:
    """A launcher's exit code and what it printed."""

    returncode: int
    stdout: str


def submit(runs: Path, sample: Path, **variables: str) -> Submitted:
    """Run the call of dp2's launch script in this process, because another Python would only take time."""
    settings = {"LAUNCHER": "slurm", "NODES": "2", "ITERS": "5", "RUNS": str(runs)}
    printed = io.StringIO()
    variables = {**settings, "DATA": str(sample), **variables}
    with patch.dict(os.environ, variables), redirect_stdout(printed), redirect_stderr(printed):
        code = run_target("run", ("dp2", "gpt2-tiny", "2cpu", "--"))
    return Submitted(code, printed.getvalue())


def test_a_submitted_run_has_its_folder_script_and_job_number(
    programs: Path, tmp_path: Path, sample_prefix: Path
) -> None:
    runs = tmp_path / "runs"
    answer = submit(runs, sample_prefix)
    assert answer.returncode == 0, answer.stdout
    (folder,) = run_folders(runs)
    text = (folder / "job.sbatch").read_text()
    assert text == (programs / "submitted").read_text()
    assert f"RUN_FOLDER={folder}" in text
    assert "#SBATCH --nodes=2" in text
    assert "LAUNCHER" not in text  # Otherwise the job would submit another job.
    job = json.loads((folder / "job.json").read_text())
    assert (job["job_id"], job["nodes"]) == ("12", 2)
    assert read_status(folder) == StatusRecord(Status.INCOMPLETE, None, "Waits in Slurm's queue.")


def test_repeats_are_array_elements_with_separate_folders(
    programs: Path, tmp_path: Path, sample_prefix: Path
) -> None:
    runs = tmp_path / "runs"
    assert submit(runs, sample_prefix, REPEATS="2").returncode == 0
    folders = run_folders(runs)
    jobs = [json.loads((folder / "job.json").read_text())["job_id"] for folder in folders]
    assert jobs == ["12_0", "12_1"]
    text = (folders[0] / "job.sbatch").read_text()
    assert "--array=0-1%8" in text
    assert "REPEATS" not in text


def test_a_key_is_passed_by_name_and_only_to_a_run_that_uses_it(
    programs: Path, tmp_path: Path, sample_prefix: Path
) -> None:
    runs = tmp_path / "runs"
    assert submit(runs, sample_prefix, WANDB_API_KEY=KEY).returncode == 0
    assert "WANDB" not in (programs / "submitted").read_text()
    assert submit(runs, sample_prefix, WANDB_API_KEY=KEY, WANDB="1").returncode == 0
    assert "WANDB_API_KEY" in (programs / "submitted").read_text()
    written = [path for path in runs.rglob("*") if path.is_file()]
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


def test_variables_of_transport_memory_and_modules_are_passed_on_and_named(
    programs: Path, tmp_path: Path, sample_prefix: Path
) -> None:
    site = tmp_path / "site"
    site.write_text("module load cuda\n")
    passed = {
        "UCX_TLS": "rc",
        "FI_PROVIDER": "efa",
        "NCCL_IB_HCA": "mlx5",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TRITON_CACHE_DIR": "/scratch/triton",
        "CUDA_HOME": "/opt/cuda",
        "MODULEPATH": "/opt/modules",
        "LMOD_DIR": "/opt/lmod",
        "BASH_ENV": "/opt/lmod/init/bash",
    }
    runs = tmp_path / "runs"
    answer = submit(runs, sample_prefix, SLURM_SITE=str(site), HF_TOKEN=KEY, **passed)
    assert answer.returncode == 0, answer.stdout
    text = (programs / "submitted").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("#SBATCH --export="))
    assert passed.keys() <= set(line.partition("=")[2].split(","))
    assert "HF_TOKEN" not in text
    shown = " ".join(answer.stdout.split())
    assert all(name in shown.partition("passed on to it:")[2] for name in passed)


PYXIS = (
    "--container-image=IMAGE --container-mounts=SRC:DST --container-workdir=PATH --container-name=NAME "
    "--[no-]container-mount-home --[no-]container-remap-root --container-writable --container-readonly"
)
"""Options that Pyxis adds to `srun --help`."""


def render_gpu_script(sample: Path, runs: Path, **variables: str) -> str:
    """Return what a dry run of a GPU target prints, which begins with the script."""
    target = ("dp2", "gpt2-tiny", "2gpu", "--")
    settings = {"LAUNCHER": "slurm", "DRY_RUN": "1", "DATA": str(sample), "RUNS": str(runs)}
    printed = io.StringIO()
    with (
        patch.dict(os.environ, {**settings, **variables}),
        redirect_stdout(printed),
        redirect_stderr(printed),
    ):
        run_target("run", target)
    return printed.getvalue()


def test_ranks_in_a_container_of_pyxis_get_its_flags_and_no_folders_of_this_machine(
    programs: Path, tmp_path: Path, sample_prefix: Path
) -> None:
    program(programs, "srun", f"echo '{PYXIS}'")
    variables = {"UCX_TLS": "rc", "CUDA_HOME": "/opt/cuda", "TRITON_CACHE_DIR": "/scratch/triton"}
    shown = render_gpu_script(sample_prefix, tmp_path, SLURM_IMAGE="/kit.sqsh", **variables)
    (step,) = (line for line in shown.splitlines() if line.startswith("exec srun"))
    assert "--container-image=/kit.sqsh" in step
    flags = re.findall(r"--(?:no-)?(container-[a-z-]+)", step)
    assert len(flags) == 6
    assert set(flags) <= set(re.findall(r"container-[a-z-]+", PYXIS))
    (line,) = (line for line in shown.splitlines() if line.startswith("#SBATCH --export="))
    passed_on = set(line.partition("=")[2].split(","))
    assert variables.keys() & passed_on == {"UCX_TLS"}


@pytest.mark.parametrize("help_text", [PYXIS, "--nodes=N"])
@pytest.mark.parametrize("runtime", ["apptainer", "podman"])
def test_apptainer_and_podman_are_started_by_the_launchers_of_the_nodes(
    programs: Path, tmp_path: Path, sample_prefix: Path, runtime: str, help_text: str
) -> None:
    program(programs, "srun", f"echo '{help_text}'")
    shown = render_gpu_script(sample_prefix, tmp_path, RUNTIME=runtime, IMAGE="26.06-py3")
    assert "--container-image" not in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("export DATA="))
    assert {f"RUNTIME={runtime}", "IMAGE=26.06-py3"} <= set(line.split())
    assert f"{sys.executable} -m parakit" in shown
    refused = render_gpu_script(sample_prefix, tmp_path, RUNTIME=runtime, SLURM_IMAGE="/kit.sqsh")
    assert f"is an image for Pyxis, but RUNTIME={runtime} starts" in refused


def test_without_pyxis_ranks_run_on_the_host_and_an_image_is_refused(
    programs: Path, tmp_path: Path, sample_prefix: Path
) -> None:
    program(programs, "srun", "echo '--nodes=N'")
    shown = render_gpu_script(sample_prefix, tmp_path, CUDA_HOME="/opt/cuda")
    assert "--container-image" not in shown
    assert "CUDA_HOME" in shown
    refused = render_gpu_script(sample_prefix, tmp_path, SLURM_IMAGE="/kit.sqsh")
    assert "Slurm here has no Pyxis" in refused


def test_sbatch_does_not_see_variables_that_would_replace_what_the_script_states(
    programs: Path, tmp_path: Path, sample_prefix: Path
) -> None:
    replacing = {"SBATCH_EXPORT": "NONE", "SBATCH_NO_REQUEUE": "1", "SBATCH_PARTITION": "debug"}
    defaults = {"SBATCH_TIMELIMIT": "60", "SBATCH_ACCOUNT": "lab", "SBATCH_GRES": "nvme:1"}
    variables = {**replacing, **defaults, "SLURM_PARTITION": "h200"}
    answer = submit(tmp_path / "runs", sample_prefix, **variables)
    assert answer.returncode == 0, answer.stdout
    seen = dict(
        line.split("=", 1) for line in (programs / "env").read_text().splitlines() if "=" in line
    )
    assert {name: text for name, text in seen.items() if name.startswith("SBATCH_")} == defaults
    assert f"Not used, because the script states it: {', '.join(sorted(replacing))}." in " ".join(
        answer.stdout.split()
    )


def test_job_that_slurm_refuses_leaves_no_run_folder(
    programs: Path, tmp_path: Path, sample_prefix: Path
) -> None:
    program(programs, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    answer = submit(tmp_path / "runs", sample_prefix, SLURM_PARTITION="x")
    assert answer.returncode == 2
    assert "Slurm refuses the job: error: invalid partition specified: x" in answer.stdout
    assert run_folders(tmp_path / "runs") == []


def test_job_that_slurm_may_have_accepted_keeps_its_folder(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parakit.launch.submit.SUBMIT_SECONDS", 0.2)
    program(programs, "sbatch", "exec sleep 600")
    folder = tmp_path / "R1"
    folder.mkdir()
    job = BatchJob(
        "dp2", DeviceKind.CPU, 1, Slurm(nodes=2), (ArrayTask(str(folder), ("run",), {}),), "python"
    )
    with pytest.raises(LaunchError, match=f"may have taken the job: look for dp2 .*{folder}"):
        _write_and_submit(job, (folder,), None)
    assert (folder / "job.sbatch").exists()


def test_ranks_that_do_not_divide_over_nodes_are_refused(
    programs: Path, tmp_path: Path, sample_prefix: Path
) -> None:
    answer = submit(tmp_path / "runs", sample_prefix, NODES="4")
    assert answer.returncode == 2
    assert "2 ranks cannot be split evenly over 4 nodes" in answer.stdout
    assert run_folders(tmp_path / "runs") == []


def test_a_dry_run_shows_the_script_and_writes_nothing(
    programs: Path, tmp_path: Path, sample_prefix: Path
) -> None:
    answer = submit(tmp_path / "runs", sample_prefix, DRY_RUN="1")
    assert answer.returncode == 0
    assert answer.stdout.startswith("#!/usr/bin/env bash\n")
    assert "exec srun" in answer.stdout
    assert not (tmp_path / "runs").exists()
    assert not (programs / "submitted").exists()


def job_folder(runs: Path, job: str, iterations: int = 0) -> Path:
    folder = runs / f"2026-{job}-dp2-gpt2-tiny-2cpu"
    folder.mkdir(parents=True)
    write_record(folder / "job.json", JobRecord(job, 2, "2026-01-01T00:00:00Z"))
    unfinished = StatusRecord(Status.INCOMPLETE, None, "The launcher did not finish.")
    write_record(folder / "status.json", unfinished)
    if iterations:
        lines = (ITERATION.format(number) for number in range(1, iterations + 1))
        (folder / "log.txt").write_text("".join(lines))
    return folder


def test_status_shows_queued_and_running_jobs_as_slurm_reports_them(
    programs: Path, tmp_path: Path
) -> None:
    job_folder(tmp_path, "12")
    job_folder(tmp_path, "13", iterations=3)
    program(programs, "squeue", "echo '12|PENDING|Resources'; echo '13|RUNNING|None'")
    waiting, running = read_run_statuses(tmp_path)
    assert (waiting.state, waiting.note) == ("queued", "job 12: Resources")
    assert (running.state, running.iteration, running.loss) == ("running", 3, 10.75875)


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        ("CANCELLED", Status.INTERRUPTED, "Job 12 was cancelled in Slurm"),
        ("TIMEOUT", Status.INTERRUPTED, "reached its time limit; ask for more with SLURM_TIME="),
        ("NODE_FAIL", Status.CRASHED, "Job 12 lost a node"),
        ("OUT_OF_MEMORY", Status.OUT_OF_MEMORY, "ran out of the memory that Slurm gave it"),
        ("FAILED", Status.CRASHED, "ended FAILED in Slurm; see slurm.txt"),
    ],
)
def test_job_without_a_status_of_its_launcher_gets_it_from_slurm(
    programs: Path, tmp_path: Path, state: str, status: Status, reason: str
) -> None:
    folder = job_folder(tmp_path, "12", iterations=2)
    program(programs, "squeue", f"echo '12|{state}|None'")
    (seen,) = read_run_statuses(tmp_path)
    assert seen.state == status.value
    assert reason in seen.note
    assert read_status(folder).status is status


def test_a_job_that_slurm_forgot_is_classified_by_its_log(programs: Path, tmp_path: Path) -> None:
    job_folder(tmp_path, "12", iterations=2)
    (seen,) = read_run_statuses(tmp_path)
    assert seen.state == "incomplete"
    assert "Job 12 is gone from Slurm; its launcher left no word." in seen.note


def test_array_element_that_slurm_forgot_before_its_start_is_interrupted(
    programs: Path, tmp_path: Path
) -> None:
    folder = job_folder(tmp_path, "12_1")
    (seen,) = read_run_statuses(tmp_path)
    assert (seen.state, seen.note) == (
        "interrupted",
        "Job 12_1 left Slurm's queue before it began.",
    )
    assert read_status(folder).status is Status.INTERRUPTED


@pytest.mark.parametrize("answer", ["exit 1", "kill -9 $$", "exec sleep 600"])
def test_queued_job_is_unchanged_while_slurm_does_not_answer(
    programs: Path, tmp_path: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parakit.cluster.slurm.ASK_SECONDS", 0.5)
    folder = job_folder(tmp_path, "12")
    before = read_status(folder)
    program(programs, "squeue", answer)
    assert query_job_states(["12"]) is None
    (seen,) = read_run_statuses(tmp_path)
    assert (seen.state, seen.note) == ("incomplete", "job 12: Slurm does not answer.")
    assert read_status(folder) == before


@pytest.mark.ranks
def test_no_status_is_written_for_jobs_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job_folder(tmp_path, "12")
    before = read_status(folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    read_run_statuses(tmp_path)
    assert read_status(folder) == before


def test_job_of_another_user_is_unchanged_because_slurm_does_not_list_it(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job_folder(tmp_path, "12")
    before = read_status(folder)
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    read_run_statuses(tmp_path)
    assert read_status(folder) == before


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("TIMEOUT", "Job 12 reached its time limit; ask for more with SLURM_TIME=; see slurm.txt."),
        ("PREEMPTED", "Job 12 was preempted; see slurm.txt."),
        ("DEADLINE", "Job 12 reached its deadline; see slurm.txt."),
        ("CANCELLED", "Stopped on request after iteration 2."),
    ],
)
def test_launcher_stopped_by_slurm_gets_the_reason_of_slurm(
    programs: Path, tmp_path: Path, state: str, reason: str
) -> None:
    folder = job_folder(tmp_path, "12", iterations=2)
    asked = StatusRecord(
        Status.INTERRUPTED, None, "Stopped on request after iteration 2.", wall_seconds=7.5
    )
    write_record(folder / "status.json", asked)
    program(programs, "squeue", f"echo '12|{state}|None'")
    assert read_run_statuses(tmp_path)[0].note == reason
    assert read_status(folder) == replace(asked, reason=reason)


def test_status_recorded_by_a_launcher_is_not_overwritten(programs: Path, tmp_path: Path) -> None:
    folder = job_folder(tmp_path, "12", iterations=2)
    write_record(folder / "status.json", StatusRecord(Status.NAN, 0, "NaN from iteration 2."))
    program(programs, "squeue", "echo '12|COMPLETED|None'")
    assert read_run_statuses(tmp_path)[0].note == "NaN from iteration 2."


def test_local_run_counts_as_running_while_samples_are_written(
    tmp_path: Path, programs: Path
) -> None:
    folder = job_folder(tmp_path, "12", iterations=2)
    (folder / "job.json").unlink()
    (folder / "samples.csv").write_text("seconds\n")
    assert read_run_statuses(tmp_path)[0].state == "running"
    long_ago = time.time() - 60
    os.utime(folder / "samples.csv", (long_ago, long_ago))
    assert read_run_statuses(tmp_path)[0].state == "incomplete"


def test_remaining_time_is_estimated_from_recent_iterations(tmp_path: Path, programs: Path) -> None:
    folder = job_folder(tmp_path, "12", iterations=30)
    program(programs, "squeue", "echo '12|RUNNING|None'")
    assert (
        read_run_statuses(tmp_path)[0].left_seconds is None
    )  # The total number of iterations is unknown.
    write_run(folder, run_record(folder.name, "dp2", exit_interval=100))
    (seen,) = read_run_statuses(tmp_path)
    assert (seen.iteration, seen.iterations, seen.left_seconds) == (30, 100, 70 * 0.5)


def test_jobs_missing_in_the_queue_are_looked_up_in_accounting(programs: Path) -> None:
    program(programs, "squeue", "echo '12_1|RUNNING|None'")
    program(programs, "sacct", "echo '11|CANCELLED by 1000|None'")
    assert query_job_states(["11", "12_1", "13"]) == {
        "11": JobState("CANCELLED", "None"),
        "12_1": JobState("RUNNING", "None"),
    }


def test_control_characters_and_markup_in_a_reason_are_escaped(
    programs: Path, tmp_path: Path
) -> None:
    folder = job_folder(tmp_path, "12")
    evil = "\x1b[2J\x1b]0;title\x07[red]not markup[/red]"
    write_record(folder / "status.json", StatusRecord(Status.CRASHED, 1, evil))
    answer = subprocess.run(
        (sys.executable, "-m", "parakit", "status"),
        cwd=ROOT,
        env={**os.environ, "RUNS": str(tmp_path), "COLUMNS": "250"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\x1b" not in answer.stdout
    assert "\x07" not in answer.stdout
    assert "[red]not markup[/red]" in answer.stdout
