"""Jobs that Slurm warns of their end: flags, time for the last checkpoint, and the way back into the queue."""

import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts.io import write_record
from parakit.artifacts.run import JOB_FILE, JobRecord
from parakit.cluster.nodes import Nodes
from parakit.cluster.slurm import Slurm
from parakit.config.flags import Flags
from parakit.launch import requeue
from parakit.launch.checkpoints import LEAST_GRACE_SECONDS, choose_grace_seconds
from parakit.launch.compose import Launch, ResumePoint
from parakit.launch.job import parse_target
from parakit.launch.options import Options, Saving
from parakit.launch.run_folder import identify_computation
from parakit.launch.submit import _describe_job, _describe_task
from parakit.launch.train import compose_job
from tests.cluster.conftest import program
from tests.reporting.factory import iteration_line


def composed(sample_prefix: Path, runs: Path, **changes: object) -> Launch:
    options = replace(Options(data=str(sample_prefix), runs=runs), **changes)  # type: ignore[arg-type]
    return compose_job(parse_target("train-dp2-gpt2-tiny-2cpu").with_options(options))


def test_a_job_that_saves_is_warned_and_its_ranks_save_when_they_are_asked_to_stop(
    sample_prefix: Path, tmp_path: Path
) -> None:
    slurm, saving = Slurm(nodes=1), Saving(50)
    launch = composed(sample_prefix, tmp_path, slurm=slurm, saving=saving)
    assert _describe_job("dp2", launch).warning_seconds == 135
    assert _describe_task("runs/R", launch).argv[-1] == "--exit-signal-handler"
    asked = composed(sample_prefix, tmp_path, slurm=slurm, saving=saving, grace_seconds=600)
    assert _describe_job("dp2", asked).warning_seconds == 615
    task = _describe_task("runs/R", asked)
    assert task.settings["GRACE"] == "600"
    without = composed(sample_prefix, tmp_path, slurm=slurm)
    assert _describe_job("dp2", without).warning_seconds is None
    assert "--exit-signal-handler" not in _describe_task("runs/R", without).argv


def test_grace_has_ranks_save_without_slurm_too_and_is_no_part_of_what_is_trained(
    sample_prefix: Path, tmp_path: Path
) -> None:
    usual = composed(sample_prefix, tmp_path, saving=Saving(50))
    graceful = composed(sample_prefix, tmp_path, saving=Saving(50), grace_seconds=60)
    assert not usual.saves_at_stop
    assert graceful.saves_at_stop
    assert Flags(graceful.flags).has("--exit-signal-handler")
    assert identify_computation(usual) == identify_computation(graceful)


SAVE = (
    "(min, max) time across ranks (ms):\n"
    "    save-checkpoint ................................: (9000.10, {:.2f})\n"
)


def test_the_time_for_a_last_checkpoint_follows_from_the_last_save(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(iteration_line(4) + "\n")
    assert choose_grace_seconds(None, log) == LEAST_GRACE_SECONDS
    log.write_text(SAVE.format(90_000) + iteration_line(4) + "\n" + SAVE.format(200_000))
    assert choose_grace_seconds(None, log) == pytest.approx(401, abs=2)
    assert choose_grace_seconds(7, log) == 7


@pytest.fixture
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of job 12, and a stand-in for scontrol that writes down how it is called."""
    folder = tmp_path / "R1"
    folder.mkdir()
    write_record(folder / JOB_FILE, JobRecord("12_3", 1, "2026-01-01T00:00:00Z", None))
    programs = tmp_path / "programs"
    programs.mkdir()
    program(programs, "scontrol", f'echo "$@" >> {tmp_path}/asked')
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "15")
    return folder


def saved(monkeypatch: pytest.MonkeyPatch, *iterations: int) -> None:
    class Stored:
        is_finished = True

        def __init__(self, iteration: int) -> None:
            self.iteration = iteration

    monkeypatch.setattr(requeue, "find_checkpoints", lambda _: [Stored(n) for n in iterations])


@pytest.mark.parametrize(
    ("number", "iterations", "resumed_from", "node", "is_requeued"),
    [
        (signal.SIGUSR1, (10, 17), None, None, True),
        (signal.SIGUSR1, (10, 17), 10, 0, True),
        (
            signal.SIGUSR1,
            (10,),
            10,
            None,
            False,
        ),  # Nothing new: the next attempt would come no further.
        (signal.SIGUSR1, (100,), None, None, False),
        (signal.SIGUSR1, (), None, None, False),
        (signal.SIGUSR1, (10, 17), None, 1, False),
        (
            signal.SIGTERM,
            (10, 17),
            None,
            None,
            False,
        ),  # scancel, or a preemption that requeues by itself.
    ],
)
def test_an_announced_end_requeues_a_job_that_came_further(
    job_folder: Path,
    sample_prefix: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    iterations: tuple[int, ...],
    resumed_from: int | None,
    node: int | None,
    is_requeued: bool,
) -> None:
    launch = composed(sample_prefix, job_folder.parent, saving=Saving(10), iterations=100)
    point = ResumePoint("R1", job_folder, resumed_from) if resumed_from else None
    nodes = None if node is None else Nodes(2, node, "n1")
    launch = replace(launch, resume_point=point, nodes=nodes)
    saved(monkeypatch, *iterations)
    console = Console(file=io.StringIO(), width=200)
    assert requeue.requeue_announced_end(number, launch, job_folder, console) == is_requeued
    asked = job_folder.parent / "asked"
    assert asked.exists() == is_requeued
    if is_requeued:
        assert asked.read_text() == "requeue 12_3\n"
        assert "Job 12_3 is requeued and resumes from iteration 17." in console.file.getvalue()  # type: ignore[attr-defined]
