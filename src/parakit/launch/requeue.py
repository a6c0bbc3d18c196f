"""Requeue a Slurm job that saved a last checkpoint before its time was over, so that it resumes from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rich.console import Console

from parakit.artifacts.checkpoints import find_checkpoints
from parakit.artifacts.run import CHECKPOINTS_FOLDER
from parakit.cluster import run_program
from parakit.launch.compose import Launch
from parakit.launch.status import read_job_record


def requeue_announced_end(
    signal_number: int, launch: Launch, folder: Path, console: Console
) -> bool:
    """Ask Slurm to requeue the job of a run if Slurm announced its end and this attempt saved a checkpoint.

    Slurm requeues preempted jobs itself, but not those that reach their time limit. An attempt that saved nothing
    new is not repeated, because the next attempt would not come further. Only the first node requeues.

    Args:
        signal_number: The signal by which the launcher was asked to stop; SIGUSR1 is Slurm's announcement.
        launch: The launch of this attempt.
        folder: The run folder.
        console: Receives a sentence on the result.

    Returns:
        True if Slurm took the request.
    """
    if signal_number != signal.SIGUSR1 or "SLURM_JOB_ID" not in os.environ:
        return False
    job = read_job_record(folder)
    is_first_node = launch.nodes is None or launch.nodes.rank == 0
    if job is None or not is_first_node:
        return False
    newest_iteration = _find_newest_iteration(folder)
    first_iteration = launch.resume_point.iteration if launch.resume_point else 0
    saved_something = newest_iteration > first_iteration
    is_complete = newest_iteration >= launch.iterations
    if not saved_something or is_complete:
        return False
    output = run_program(["scontrol", "requeue", job.job_id])
    if output.succeeded:
        sentence = f"Job {job.job_id} is requeued and resumes from iteration {newest_iteration}."
    else:
        sentence = (
            f"Slurm does not requeue job {job.job_id} ({output.problem}); resume it with 'make resume "
            f"RUN={folder}'."
        )
    console.print(sentence, highlight=False)
    return output.succeeded


def _find_newest_iteration(folder: Path) -> int:
    """Return the iteration of a run's newest finished checkpoint; 0 if there is none."""
    stored = find_checkpoints(folder / CHECKPOINTS_FOLDER)
    iterations = [checkpoint.iteration for checkpoint in stored if checkpoint.is_finished]
    return max(iterations, default=0)
