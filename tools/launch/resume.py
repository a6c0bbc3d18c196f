"""`make resume RUN=…`: a run resumes from its newest valid checkpoint.

In its own strategy it resumes in its own folder: log, events and checkpoints are added to, and what
belongs to one attempt is kept in `attempts/`. In another strategy (STRATEGY=pp2) it is another run, in a
folder of its own that names its parent, because its times and its memory are not its parent's.

Apart from `relaunch`, which a requeued job uses too: `target` resumes that by itself.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools.launch.checkpoint.selected import SelectedCheckpoint, select_checkpoint
from tools.launch.compose import Launch, ResumePoint
from tools.launch.multi_node import train_share
from tools.launch.named_run import read_named_run
from tools.launch.options import Options
from tools.launch.preflight import check
from tools.launch.relaunch import relaunch
from tools.launch.run_folder import only_attempt
from tools.launch.train import describe, dry_run, train_once
from tools.records import run as records
from tools.spec.errors import LaunchError


def resume(run: str | Path, strategy: str | None, options: Options, console: Console) -> int:
    """Resume a run; 0 if it ended well.

    Raises:
        LaunchError: It cannot be resumed; nothing was changed.
    """
    if options.slurm is not None:
        raise LaunchError(
            "LAUNCHER=slurm resumes a job by itself when it is put back: 'scontrol requeue <job>'; "
            "leave it out to resume here, in an allocation or with NNODES= on each host."
        )
    run = Path(run).absolute()
    record = read_named_run(run)
    with ExitStack() as held:
        held.enter_context(only_attempt(run, options.nodes))
        choice = select_checkpoint(run)
        loaded = ResumePoint(
            run.name, run / records.CHECKPOINTS_FOLDER, choice.checkpoint.iteration
        )
        launch = relaunch(record, loaded, strategy, options)
        if options.dry_run:
            return dry_run(launch)
        if launch.nodes is None:  # Else each node reports to the others what stops it.
            check(launch)
        _tell(run, launch, choice, console)
        own_folder = launch.spec.parallelism == record.spec.parallelism
        if not own_folder:  # The run itself may be resumed at the same time.
            held.close()
        there = replace(launch.job.options, run_folder=run if own_folder else None)
        launch = replace(launch, job=launch.job.under(there))
        once = train_once if launch.nodes is None else train_share
        return 0 if once(launch, console, launch.spec.name) else 1


def _tell(run: Path, launch: Launch, choice: SelectedCheckpoint, console: Console) -> None:
    for checkpoint, flaw in choice.skipped:
        console.print(
            f"{checkpoint.path.name} is passed over: {flaw}. The one before it is used.",
            style="yellow",
            highlight=False,
        )
    console.print(
        f"{run.name} resumes after iteration {choice.checkpoint.iteration} as {launch.spec.name}: "
        f"{describe(launch)}",
        highlight=False,
    )
