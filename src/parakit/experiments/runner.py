"""The one loop that trains cells: a failed one does not stop the rest, what was made before is taken.

What stands for a run says `parakit.artifacts.identity`. `LAUNCHER=slurm make sweep` submits what is neither
made nor on its way as job arrays, one for each size.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts import run as records
from parakit.artifacts.identity import Identity, identify_run
from parakit.artifacts.run import RunRecord, Status, decode_run
from parakit.cluster import query_job_states
from parakit.config.errors import LaunchError
from parakit.config.run import Backend
from parakit.experiments.definition import Cell, Experiment
from parakit.formatting.terminal import say
from parakit.launch import (
    Launch,
    WarmPool,
    choose_image,
    ensure_initial_checkpoint,
    execute_launch,
    format_outcome,
    identify_computation,
    identify_launch,
    read_job_record,
    read_run_statuses,
    spread_over_nodes,
    submit_array,
)
from parakit.logs import find_run_folders

NO_TIME = "no time was left for it"


@dataclass(frozen=True)
class CellResult:
    """What there is of one cell by now."""

    cell: Cell
    launch: Launch
    runs: tuple[Path, ...]
    """Run folders that ended well, newest first, at most as many as were wanted."""
    failed: tuple[Path, ...] = ()
    """Run folders of this call that did not."""
    failure: str = ""

    @property
    def folders(self) -> tuple[Path, ...]:
        """All of them."""
        return (*self.failed, *self.runs)

    @property
    def complete(self) -> bool:
        """Every repeat is there."""
        return len(self.runs) >= self.cell.repeats


@dataclass
class Runner:
    """Trains cells in turn; `results` says at any time what there is, also after Ctrl-C."""

    experiment: Experiment
    launches: Mapping[Cell, Launch]
    console: Console
    _warm: WarmPool = field(default_factory=WarmPool)
    _longest_seconds: dict[int, float] = field(default_factory=dict)
    """Of the runs so far, by their number of iterations."""
    _began: float = field(default_factory=time.monotonic)
    _made: dict[Cell, list[Path]] = field(default_factory=dict)
    _failed: dict[Cell, tuple[str, Path | None]] = field(default_factory=dict)

    def train(self) -> None:
        """Train what is not there, while there is time; on Slurm submit it.

        Raises:
            Interrupted: A request to stop came; the run that was on its way is complete on disk.
            LaunchError: Slurm is not here, does not answer, or refuses a job.
        """
        if self.experiment.options.slurm is not None:
            submit_missing(self.launches, self.console)
            return
        with self._warm:
            self._train_all()

    def _train_all(self) -> None:
        cells, self._began = list(self.launches), time.monotonic()
        steps = order_repeats(cells)
        for done, (repeat, cell) in enumerate(steps, start=1):
            launch = self.launches[cell]
            title = self._title(cell, launch, cells.index(cell) + 1, repeat)
            if cell in self._failed:
                continue
            runs = self._runs(cell, launch)
            if len(runs) >= repeat:
                say(self.console, f"{title}: made before → {runs[-repeat].name}")
                continue
            expected = self._longest_seconds.get(launch.iterations, cell.expected_seconds)
            if self.seconds_left is not None and expected > self.seconds_left:
                say(self.console, f"{title}: left out, {NO_TIME}; repeat the command.")
                continue
            said = self._train(cell, launch, title)
            seconds = (time.monotonic() - self._began) / done * (len(steps) - done)
            left = f", about {seconds:.0f} s left" if done < len(steps) else ""
            say(self.console, f"{title}: {said}{left}")

    @property
    def seconds_left(self) -> float | None:
        """Of the budget, if there is one."""
        if self.experiment.budget_seconds is None:
            return None
        return self.experiment.budget_seconds - (time.monotonic() - self._began)

    def results(self) -> list[CellResult]:
        """One a cell, in order."""
        found = []
        for cell, launch in self.launches.items():
            failure, folder = self._failed.get(cell, ("", None))
            failed = (folder,) if folder else ()
            runs = tuple(self._runs(cell, launch))
            found.append(CellResult(cell, launch, runs, failed, failure))
        return found

    def _runs(self, cell: Cell, launch: Launch) -> list[Path]:
        """Those that count by now, newest first."""
        if not self.experiment.file.takes_finished:
            return self._made.get(cell, [])[::-1]
        in_slurm = launch.job.options.slurm is not None
        found = find_runs_finished_in_slurm(launch) if in_slurm else find_finished_runs(launch)
        return found[: cell.repeats]

    def _train(self, cell: Cell, launch: Launch, title: str) -> str:
        began, folder = time.monotonic(), None
        try:
            launch = launch.fork_from_pool(self._warm) if self.experiment.file.warm else launch
            ensure_initial_checkpoint(launch, self.console)
            limited = replace(launch, time_limit_seconds=self.seconds_left)
            folder, status = execute_launch(limited, launch.job.options.runs, self.console, title)
        except LaunchError as error:
            said = problem = str(error)
        else:
            said = format_outcome(folder, status)
            problem = "" if status.status is Status.OK else f"{status.status}: {status.reason}"
        seconds = time.monotonic() - began
        longest = self._longest_seconds.get(launch.iterations, 0.0)
        self._longest_seconds[launch.iterations] = max(longest, seconds)
        if problem:
            self._failed[cell] = problem, folder
        elif folder:
            self._made.setdefault(cell, []).append(folder)
        return said

    def _title(self, cell: Cell, launch: Launch, number: int, repeat: int) -> str:
        which = f" repeat {repeat}" if cell.repeats > 1 else ""
        other = launch.spec.backend != Backend.MEGATRON
        short = f"{launch.spec.backend} {cell.job.strategy}" if other else cell.job.strategy
        # Cells of axes differ in more than strategy and backend.
        name = cell.name if self.experiment.file.skips_illegal or cell.label else short
        return f"[{number}/{len(self.launches)}]{which} {name}"


def order_repeats(cells: Sequence[Cell]) -> list[tuple[int, Cell]]:
    """Every repeat of every cell, in the order in which they are trained.

    Repeats are apart, so that a slow drift falls on all cells alike. Cells with more repeats come before
    the others, because a median of one run has no scatter to judge others by.
    """
    return [
        (repeat, cell)
        for number in sorted({cell.repeats for cell in cells}, reverse=True)
        for repeat in range(1, number + 1)
        for cell in cells
        if cell.repeats == number
    ]


STATES_NOT_RESUBMITTED = ("queued", "running", Status.OK.value)
"""States of runs that need not be submitted again."""


def find_finished_runs(launch: Launch) -> list[Path]:
    """Runs that did exactly this, here, and ended well, newest first.

    A run that was resumed in its own folder counts if each attempt was made here and asked for the
    same: its losses are an undisturbed run's, and its times leave out the first lines after a start.
    """
    folders = _find_candidate_folders(launch)
    wanted = identify_launch(launch, launch.job.options.runs) if folders else None
    return [folder for folder in folders if wanted and _stands_for(folder, wanted)]


def submit_missing(launches: Mapping[Cell, Launch], console: Console) -> None:
    """Submit what is neither made nor on its way, each under its make variables.

    Raises:
        LaunchError: Slurm is not here, does not answer, or refuses a job.
    """
    (runs,) = {launch.job.options.runs for launch in launches.values()}
    jobs = [job.job_id for folder in find_run_folders(runs) if (job := read_job_record(folder))]
    if query_job_states(jobs) is None:
        raise LaunchError(
            f"Slurm does not say what has become of the jobs in {runs} (squeue gives no answer), so "
            "what is on its way cannot be distinguished from what is missing; repeat the command once "
            "it does."
        )
    seen = {one.run: one.state for one in read_run_statuses(runs)}
    groups: dict[str, list[Launch]] = {}
    for cell, launch in launches.items():
        slurm = launch.job.options.slurm
        assert slurm is not None
        # Over NODES= where they share its ranks evenly, else on one node.
        nodes = slurm.nodes if launch.devices % slurm.nodes == 0 else 1
        wanted = cell.repeats - len(_find_runs_in_state(STATES_NOT_RESUBMITTED, seen, launch))
        if wanted > 0:
            spread = spread_over_nodes(launch, nodes)
            groups.setdefault(launch.job.device_suffix, []).extend([spread] * wanted)
    for place, each in groups.items():
        submit_array(f"sweep-{place}", each, console)


def find_runs_finished_in_slurm(launch: Launch) -> list[Path]:
    """Runs of this cell that a job made and that ended well, newest first."""
    seen = {one.run: one.state for one in read_run_statuses(launch.job.options.runs)}
    return _find_runs_in_state((Status.OK.value,), seen, launch)


def _find_runs_in_state(
    states: Container[str], seen: Mapping[str, str], launch: Launch
) -> list[Path]:
    return [
        folder
        for folder in _find_candidate_folders(launch)
        if seen.get(folder.name, "") in states and _was_submitted(folder, launch)
    ]


def _was_submitted(folder: Path, launch: Launch) -> bool:
    """Whether a job in this folder was asked for exactly this, on whatever machine, requeued or not.

    What it is asked for is composed here, as it was then; `run.json` is what the nodes made of it.
    """
    job = read_job_record(folder)
    if job is None or job.submitted is None:
        return False
    try:
        asked = decode_run(job.submitted)
        # `make resume` takes ITERS= and EXTRA=.
        alike = len({identify_run(attempt).training for attempt in _read_attempts(folder)}) == 1
    except (OSError, ValueError):
        return False
    same_image = job.image == choose_image(launch)
    same_work = identify_run(asked).training == identify_computation(launch)
    return alike and same_work and asked.entry == launch.entry and same_image


def _find_candidate_folders(launch: Launch) -> list[Path]:
    """Run folders of this model and number of devices, newest first, whatever their strategy's name.

    A strategy has several names (`zero1` over two ranks is `dp2-zero1`); what was trained says the
    specification in `run.json`.
    """
    pattern = f"2*-{launch.model.name}-{launch.devices}{launch.spec.device}"
    return sorted(launch.job.options.runs.glob(pattern), reverse=True)


def _read_attempts(folder: Path) -> list[RunRecord]:
    """What each attempt of a run was asked for and where, oldest first; one for a run never resumed.

    Raises:
        OSError: A record is not there.
        msgspec.DecodeError: One is not of this shape.
    """
    past = (folder / records.ATTEMPTS_FOLDER).glob("[0-9]*")
    earlier = sorted(past, key=lambda path: int(path.name))
    return [records.read_run(each) for each in (*earlier, folder)]


def _stands_for(folder: Path, wanted: Identity) -> bool:
    try:
        attempts, status = _read_attempts(folder), records.read_status(folder)
    except (OSError, ValueError):  # Also of msgspec, and a folder's name that is no number.
        return False
    ended_well = status.status is records.Status.OK
    return ended_well and all(identify_run(each).stands_for(wanted) for each in attempts)
