"""Runs that were made before, here or by Slurm, and stand for a study's (`tools.records.identity`).

`LAUNCHER=slurm make sweep` submits what is neither made nor on its way as job arrays, one for each size.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

from rich.console import Console

from tools.cluster.slurm import job_states
from tools.launch.compose import Launch
from tools.launch.run_folder import computed_by, identity_here
from tools.launch.status import follow, read_job
from tools.launch.submit import image_asked, over_nodes, submit_array
from tools.records import run as records
from tools.records.identity import Identity, identity_of
from tools.records.run import RunRecord, Status, decode_run
from tools.report.read.runs import find_run_folders
from tools.spec.errors import LaunchError
from tools.study.definition import Cell

ON_THE_WAY = ("queued", "running", Status.OK.value)
"""States of runs that need not be submitted again."""


def finished_runs(launch: Launch) -> list[Path]:
    """Runs that did exactly this, here, and ended well, newest first.

    A run that was resumed in its own folder counts if each attempt was made here and asked for the
    same: its losses are an undisturbed run's, and its times leave out the first lines after a start.
    """
    folders = _folders_like(launch)
    wanted = identity_here(launch, launch.job.options.runs) if folders else None
    return [folder for folder in folders if wanted and _is_same(folder, wanted)]


def submit_missing(launches: Mapping[Cell, Launch], console: Console) -> None:
    """Submit what is neither made nor on its way, each under its make variables.

    Raises:
        LaunchError: Slurm is not here, does not answer, or refuses a job.
    """
    (runs,) = {launch.job.options.runs for launch in launches.values()}
    jobs = [job.job_id for folder in find_run_folders(runs) if (job := read_job(folder))]
    if job_states(jobs) is None:
        raise LaunchError(
            f"Slurm does not say what has become of the jobs in {runs} (squeue gives no answer), so "
            "what is on its way cannot be distinguished from what is missing; repeat the command once "
            "it does."
        )
    seen = {one.run: one.state for one in follow(runs)}
    groups: dict[str, list[Launch]] = {}
    for cell, launch in launches.items():
        slurm = launch.job.options.slurm
        assert slurm is not None
        # Over NODES= where they share its ranks evenly, else on one node.
        nodes = slurm.nodes if launch.devices % slurm.nodes == 0 else 1
        wanted = cell.repeats - len(_in_state(ON_THE_WAY, seen, launch))
        if wanted > 0:
            spread = over_nodes(launch, nodes)
            groups.setdefault(launch.job.place, []).extend([spread] * wanted)
    for place, each in groups.items():
        submit_array(f"sweep-{place}", each, console)


def finished_in_slurm(launch: Launch) -> list[Path]:
    """Runs of this cell that a job made and that ended well, newest first."""
    seen = {one.run: one.state for one in follow(launch.job.options.runs)}
    return _in_state((Status.OK.value,), seen, launch)


def _in_state(states: Container[str], seen: Mapping[str, str], launch: Launch) -> list[Path]:
    return [
        folder
        for folder in _folders_like(launch)
        if seen.get(folder.name, "") in states and _was_submitted(folder, launch)
    ]


def _was_submitted(folder: Path, launch: Launch) -> bool:
    """Whether a job in this folder was asked for exactly this, on whatever machine, requeued or not.

    What it is asked for is composed here, as it was then; `run.json` is what the nodes made of it.
    """
    job = read_job(folder)
    if job is None or job.submitted is None:
        return False
    try:
        asked = decode_run(job.submitted)
        # `make resume` takes ITERS= and EXTRA=.
        alike = len({identity_of(attempt).computed for attempt in _attempts_of(folder)}) == 1
    except (OSError, ValueError):
        return False
    same_image = job.image == image_asked(launch)
    same_work = identity_of(asked).computed == computed_by(launch)
    return alike and same_work and asked.entry == launch.entry and same_image


def _folders_like(launch: Launch) -> list[Path]:
    """Run folders of this model and number of devices, newest first, whatever their strategy's name.

    A strategy has several names (`zero1` over two ranks is `dp2-zero1`); what was trained says the
    specification in `run.json`.
    """
    pattern = f"2*-{launch.model.name}-{launch.devices}{launch.spec.device}"
    return sorted(launch.job.options.runs.glob(pattern), reverse=True)


def _attempts_of(folder: Path) -> list[RunRecord]:
    """What each attempt of a run was asked for and where, oldest first; one for a run never resumed.

    Raises:
        OSError: A record is not there.
        msgspec.DecodeError: One is not of this shape.
    """
    past = (folder / records.ATTEMPTS_FOLDER).glob("[0-9]*")
    earlier = sorted(past, key=lambda path: int(path.name))
    return [records.read_run(each) for each in (*earlier, folder)]


def _is_same(folder: Path, wanted: Identity) -> bool:
    try:
        attempts, status = _attempts_of(folder), records.read_status(folder)
    except (OSError, ValueError):  # Also of msgspec, and a folder's name that is no number.
        return False
    ended_well = status.status is records.Status.OK
    return ended_well and all(identity_of(each).stands_for(wanted) for each in attempts)
