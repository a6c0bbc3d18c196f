"""`LAUNCHER=slurm make sweep`: the cells that are not there yet, as job arrays, one for each size."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools.cluster.slurm import job_states
from tools.launch.compose import Launch
from tools.launch.options import Options
from tools.launch.run_folder import computed_by
from tools.launch.status import RunStatus, follow, read_job
from tools.launch.submit import image_asked, over_nodes, submit_array
from tools.records.identity import identity_of
from tools.records.run import Status, decode_run
from tools.report.read.runs import find_run_folders
from tools.spec.errors import LaunchError
from tools.study.finished import attempts_of, folders_like, trained_alike

COUNT = ("queued", "running", Status.OK.value)
"""States of runs that need not be submitted again."""


def submit_missing(launches: Sequence[Launch], options: Options, console: Console) -> None:
    """Submit what is neither made nor on its way, each under its make variables.

    Raises:
        LaunchError: Slurm is not here, does not answer, or refuses a job.
    """
    _require_an_answer(options.runs)
    seen = {one.run: one for one in follow(options.runs)}
    groups: dict[str, list[Launch]] = {}
    for launch in launches:
        wanted = options.repeats - len(_in_state(COUNT, seen, launch, options))
        groups.setdefault(launch.job.place, []).extend([_spread(launch, options)] * wanted)
    for place, each in groups.items():
        if each:
            submit_array(f"sweep-{place}", each, _of(each[0], options), console)


def finished_in_slurm(launch: Launch, options: Options) -> list[Path]:
    """Runs of this cell that a job made and that ended well, newest first."""
    seen = {one.run: one for one in follow(options.runs)}
    return _in_state((Status.OK.value,), seen, launch, options)


def _require_an_answer(runs: Path) -> None:
    jobs = [job.job_id for folder in find_run_folders(runs) if (job := read_job(folder))]
    if job_states(jobs) is None:
        raise LaunchError(
            f"Slurm does not say what has become of the jobs in {runs} (squeue gives no answer), so "
            "what is on its way cannot be distinguished from what is missing; repeat the command once "
            "it does."
        )


def _in_state(
    states: Container[str], seen: Mapping[str, RunStatus], launch: Launch, options: Options
) -> list[Path]:
    return [
        folder
        for folder in folders_like(launch, options.runs)
        if folder.name in seen
        and seen[folder.name].state in states
        and _was_submitted(folder, launch, options)
    ]


def _was_submitted(folder: Path, launch: Launch, options: Options) -> bool:
    """Whether a job in this folder was asked for exactly this, on whatever machine, requeued or not.

    What it is asked for is composed here, as it was then; `run.json` is what the nodes made of it.
    """
    job = read_job(folder)
    if job is None or job.submitted is None:
        return False
    try:
        asked = decode_run(job.submitted)
        alike = trained_alike(attempts_of(folder))
    except (OSError, ValueError):
        return False
    same_image = job.image == image_asked(launch.spec.device, options)
    same_work = identity_of(asked).computed == computed_by(launch)
    return alike and same_work and asked.entry == launch.entry and same_image


def _spread(launch: Launch, options: Options) -> Launch:
    """Over NODES= where they share its ranks evenly, else on one node."""
    assert options.slurm is not None
    nodes = options.slurm.nodes if launch.devices % options.slurm.nodes == 0 else 1
    return over_nodes(launch, replace(options.slurm, nodes=nodes))


def _of(launch: Launch, options: Options) -> Options:
    assert options.slurm is not None
    assert launch.nodes is not None
    return replace(options, slurm=replace(options.slurm, nodes=launch.nodes.count))
