"""Train the cells of an experiment one after another, and find runs that were made before.

A "cell" is one combination of model, strategy, devices and options that an experiment trains, once or several times.
A cell that fails does not stop the others. `parakit.artifacts.identity` decides whether a finished run can be used in
place of a launch. `LAUNCHER=slurm make sweep` submits the missing runs as job arrays, one per number and kind of
devices.
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
from parakit.logs import find_run_folders, load_runs
from parakit.reporting import why_disturbed

NO_TIME = "no time was left for it"
LONGEST_RERUN_SECONDS = 120.0
"""Seconds of the longest run that is made again because other programs slowed it down."""


@dataclass(frozen=True)
class CellResult:
    """Runs of one cell that exist so far, and why a run failed."""

    cell: Cell
    launch: Launch
    runs: tuple[Path, ...]
    """Run folders that ended well, newest first, at most one per repeat."""
    failed: tuple[Path, ...] = ()
    """Run folders of this call that did not end well."""
    failure: str = ""
    """Why a run failed; empty if none did."""
    replaced: tuple[Path, ...] = ()
    """Run folders that ended well, that other programs slowed down, and that undisturbed runs in `runs` replace."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """All run folders: failed ones first, replaced ones last."""
        return (*self.failed, *self.runs, *self.replaced)

    @property
    def is_complete(self) -> bool:
        """True if every repeat ended well."""
        return len(self.runs) >= self.cell.repeats


@dataclass(frozen=True)
class Disturbance:
    """Slowdown of a run by other programs, and the time for which the run trained."""

    reason: str
    """Rank and fraction of a core that it got; empty if the run was not disturbed."""
    seconds: float
    """Seconds of all iterations of the run, without its start."""


@dataclass
class Runner:
    """Trains cells one after another; `list_results` returns the runs that exist at any time."""

    experiment: Experiment
    launches: Mapping[Cell, Launch]
    console: Console
    _warm: WarmPool = field(default_factory=WarmPool)
    _longest_seconds: dict[int, float] = field(default_factory=dict)
    """Seconds of the longest run so far, by number of iterations."""
    _began: float = field(default_factory=time.monotonic)
    _runs: dict[Cell, list[Path]] = field(default_factory=dict)
    """Run folders that this runner made and that ended well, oldest first."""
    _failures: dict[Cell, tuple[str, Path | None]] = field(default_factory=dict)
    """Why a cell failed, and the run folder if there is one."""
    _disturbances: dict[Path, Disturbance] = field(default_factory=dict)
    """Disturbance of each run folder that was looked at."""

    def train(self) -> None:
        """Train the missing runs while there is time; with LAUNCHER=slurm submit them instead.

        Raises:
            Interrupted: The user asked to stop; the current run is complete on disk.
            LaunchError: Slurm is not installed, does not answer, or refuses a job.
        """
        if self.experiment.options.slurm is not None:
            submit_missing(self.launches, self.console)
            return
        with self._warm:
            self._train_all()

    def _train_all(self) -> None:
        """Train every repeat of every cell that has no run yet, and print a line per repeat.

        A cell that has failed is not trained again. A repeat for which the time budget is too short is left out.
        """
        self._began = time.monotonic()
        cells = list(self.launches)
        steps = order_repeats(cells)
        for step, (repeat, cell) in enumerate(steps, start=1):
            if cell in self._failures:
                continue
            launch = self.launches[cell]
            title = self._format_title(cell, launch, cells.index(cell) + 1, repeat)
            runs = self._list_runs(cell, launch)
            if len(runs) >= repeat:
                # Runs are listed from the newest to the oldest, and repeats count from the oldest.
                say(self.console, f"{title}: made before → {runs[-repeat].name}")
                continue
            expected_seconds = self._longest_seconds.get(launch.iterations, cell.expected_seconds)
            if self.seconds_left is not None and expected_seconds > self.seconds_left:
                say(self.console, f"{title}: left out, {NO_TIME}; repeat the command.")
                continue
            outcome = self._train_once(cell, launch, title)
            remaining = ""
            steps_left = len(steps) - step
            if steps_left:
                seconds_per_step = (time.monotonic() - self._began) / step
                remaining = f", about {seconds_per_step * steps_left:.0f} s left"
            say(self.console, f"{title}: {outcome}{remaining}")
        for number, (cell, launch) in enumerate(self.launches.items(), start=1):
            if self._train_disturbed_again(cell, launch, number):
                # The other cells would be disturbed again, too.
                say(self.console, "Other programs still use the cores: no other cell is repeated.")
                break

    def _train_disturbed_again(self, cell: Cell, launch: Launch, number: int) -> bool:
        """Train a cell once more if other programs slowed a run of it down, and print a line on the new run.

        Return True if the new run was slowed down as well. Nothing is trained if the cell has an additional run
        already, if a run takes longer than LONGEST_RERUN_SECONDS, or if the time budget is too short. A new run that
        fails changes no result.

        Args:
            cell: The cell.
            launch: The cell's launch.
            number: Number of the cell among all cells, from 1.
        """
        if cell in self._failures or launch.spec.device != "cpu":
            return False
        folders = self._list_well_ended(cell, launch)
        if len(folders) != cell.repeats:
            return False
        disturbances = [self._find_disturbance(folder) for folder in folders]
        disturbed = [disturbance for disturbance in disturbances if disturbance.reason]
        if not disturbed:
            return False
        seconds = max(disturbance.seconds for disturbance in disturbed)
        seconds = max(seconds, self._longest_seconds.get(launch.iterations, 0.0))
        limit = LONGEST_RERUN_SECONDS
        if self.seconds_left is not None:
            limit = min(limit, self.seconds_left)
        if seconds > limit:
            return False
        title = f"[{number}/{len(self.launches)}] {self._format_name(cell, launch)} again"
        outcome = self._train_once(cell, launch, title)
        self._failures.pop(cell, None)
        say(self.console, f"{title}, because {disturbed[0].reason}: {outcome}")
        newest = self._list_well_ended(cell, launch)[0]
        return newest not in folders and bool(self._find_disturbance(newest).reason)

    @property
    def seconds_left(self) -> float | None:
        """Seconds that are left of the experiment's time budget; None without a budget."""
        if self.experiment.budget_seconds is None:
            return None
        return self.experiment.budget_seconds - (time.monotonic() - self._began)

    def list_results(self) -> list[CellResult]:
        """Return the runs that exist so far, one result per cell in the experiment's order."""
        results = []
        for cell, launch in self.launches.items():
            failure = ""
            failed_folders: tuple[Path, ...] = ()
            if cell in self._failures:
                failure, folder = self._failures[cell]
                # A run that failed before it had a folder has none.
                failed_folders = (folder,) if folder else ()
            runs, replaced = self._choose_runs(cell, launch)
            result = CellResult(
                cell, launch, runs, failed_folders, failure=failure, replaced=replaced
            )
            results.append(result)
        return results

    def _choose_runs(self, cell: Cell, launch: Launch) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """Return the runs of a cell, newest first and at most one per repeat, and the runs that these replace.

        If the cell was trained once more, its oldest disturbed run is replaced.
        """
        folders = self._list_well_ended(cell, launch)[: cell.repeats + 1]
        if len(folders) <= cell.repeats:
            return tuple(folders), ()
        disturbed = [folder for folder in folders if self._find_disturbance(folder).reason]
        # An older run of which there is no need is left out too, but it is not replaced.
        left_out = disturbed[-1] if disturbed else folders[-1]
        runs = tuple(folder for folder in folders if folder != left_out)
        return runs, (left_out,) if disturbed else ()

    def _find_disturbance(self, folder: Path) -> Disturbance:
        """Return how other programs slowed a run down. Each folder is read once."""
        if folder not in self._disturbances:
            self._disturbances[folder] = find_disturbance(folder)
        return self._disturbances[folder]

    def _list_runs(self, cell: Cell, launch: Launch) -> list[Path]:
        """Return the folders of a cell's runs that ended well so far, newest first, at most one per repeat."""
        return self._list_well_ended(cell, launch)[: cell.repeats]

    def _list_well_ended(self, cell: Cell, launch: Launch) -> list[Path]:
        """Return the folders of all runs of a cell that ended well so far, newest first.

        Runs that were made before this experiment are included, unless the experiment's file excludes them.
        """
        if not self.experiment.file.takes_finished:
            return self._runs.get(cell, [])[::-1]
        if launch.job.options.slurm is not None:
            return find_runs_finished_in_slurm(launch)
        return find_finished_runs(launch)

    def _train_once(self, cell: Cell, launch: Launch, title: str) -> str:
        """Train one repeat of a cell; return the outcome as text.

        The run's folder or failure, and the seconds it took, are stored in this runner.
        """
        began, folder = time.monotonic(), None
        try:
            if self.experiment.file.warm:
                launch = launch.fork_from_pool(self._warm)
            ensure_initial_checkpoint(launch, self.console)
            limited = replace(launch, time_limit_seconds=self.seconds_left)
            folder, status = execute_launch(limited, launch.job.options.runs, self.console, title)
        except LaunchError as error:
            outcome = problem = str(error)
        else:
            outcome = format_outcome(folder, status)
            problem = "" if status.status is Status.OK else f"{status.status}: {status.reason}"
        seconds = time.monotonic() - began
        longest = self._longest_seconds.get(launch.iterations, 0.0)
        self._longest_seconds[launch.iterations] = max(longest, seconds)
        if problem:
            self._failures[cell] = problem, folder
        elif folder:
            self._runs.setdefault(cell, []).append(folder)
        return outcome

    def _format_title(self, cell: Cell, launch: Launch, number: int, repeat: int) -> str:
        """Return the beginning of a progress line, such as `[3/12] repeat 2 native dp2`.

        It has the number of the cell among all cells, the number of the repeat if the cell has several, and
        the cell's name.
        """
        repeat_text = f" repeat {repeat}" if cell.repeats > 1 else ""
        return f"[{number}/{len(self.launches)}]{repeat_text} {self._format_name(cell, launch)}"

    def _format_name(self, cell: Cell, launch: Launch) -> str:
        """Return the name of a cell in a progress line: its strategy and backend, or its full name."""
        backend, strategy = launch.spec.backend, cell.job.strategy
        # Experiments that skip illegal cells, such as a sweep, have cells that differ in more than strategy and
        # backend, for example in the model. So these cells, and cells with a label, are shown by full name.
        needs_full_name = self.experiment.file.skips_illegal or bool(cell.label)
        if needs_full_name:
            return cell.name
        return strategy if backend == Backend.MEGATRON else f"{backend} {strategy}"


def find_disturbance(folder: Path) -> Disturbance:
    """Return how other programs slowed a run on CPU ranks down, and for how long the run trained.

    The reason is empty if the run was not disturbed or cannot be read.
    """
    (runs, _) = load_runs([folder])
    if not runs:
        return Disturbance("", 0.0)
    lines = runs[0].log.iterations
    times_ms = lines.values("elapsed_ms")[lines.known("elapsed_ms")]
    return Disturbance(why_disturbed(runs[0]), float(times_ms.sum()) / 1000)


def order_repeats(cells: Sequence[Cell]) -> list[tuple[int, Cell]]:
    """Return all repeats of all cells in the order of training, as pairs of the repeat's number (from 1) and the cell.

    Cells with most repeats come first, with all of their repeats. Cells with equally many repeats take turns: each is
    trained once before any is trained again. So a slow drift of the machine affects all of them.
    """
    steps: list[tuple[int, Cell]] = []
    for num_repeats in sorted({cell.repeats for cell in cells}, reverse=True):
        equal_cells = [cell for cell in cells if cell.repeats == num_repeats]
        for repeat in range(1, num_repeats + 1):
            steps += [(repeat, cell) for cell in equal_cells]
    return steps


STATES_NOT_RESUBMITTED = ("queued", "running", Status.OK.value)
"""States of runs that need not be submitted again."""


def find_finished_runs(launch: Launch) -> list[Path]:
    """Return the folders of runs on this machine that trained exactly this launch and ended well, newest first.

    A run that was interrupted and resumed counts if all of its attempts were made on this machine and trained the
    same. Its losses are those of an undisturbed run, and its times leave out the first iterations after each start.
    """
    folders = _find_candidate_folders(launch)
    if not folders:
        return []
    identity = identify_launch(launch, launch.job.options.runs)
    return [folder for folder in folders if identity and _stands_for(folder, identity)]


def submit_missing(launches: Mapping[Cell, Launch], console: Console) -> None:
    """Submit the repeats that are neither finished nor queued nor running to Slurm, one job array per kind of devices.

    Raises:
        LaunchError: Slurm is not installed, does not answer, or refuses a job.
    """
    (runs,) = {launch.job.options.runs for launch in launches.values()}
    _refuse_silent_slurm(runs)
    states = _read_states(runs)
    launches_by_devices: dict[str, list[Launch]] = {}
    for cell, launch in launches.items():
        slurm = launch.job.options.slurm
        assert slurm is not None
        existing = _find_runs_in_state(STATES_NOT_RESUBMITTED, states, launch)
        num_missing = cell.repeats - len(existing)
        if num_missing <= 0:
            continue
        # NODES= counts only where the nodes share the ranks evenly.
        nodes = slurm.nodes if launch.devices % slurm.nodes == 0 else 1
        spread = spread_over_nodes(launch, nodes)
        group = launches_by_devices.setdefault(launch.job.device_suffix, [])
        group += [spread] * num_missing
    for suffix, group in launches_by_devices.items():
        submit_array(f"sweep-{suffix}", group, console)


def _refuse_silent_slurm(runs: Path) -> None:
    """Raise LaunchError if Slurm does not report the states of the jobs in a folder of runs."""
    jobs = [read_job_record(folder) for folder in find_run_folders(runs)]
    job_ids = [job.job_id for job in jobs if job]
    if query_job_states(job_ids) is None:
        raise LaunchError(
            f"Slurm does not say what has become of the jobs in {runs} (squeue gives no answer), so "
            "what is on its way cannot be distinguished from what is missing; repeat the command once "
            "it does."
        )


def find_runs_finished_in_slurm(launch: Launch) -> list[Path]:
    """Return the folders of runs of this launch that Slurm jobs made and that ended well, newest first."""
    return _find_runs_in_state((Status.OK.value,), _read_states(launch.job.options.runs), launch)


def _read_states(runs: Path) -> dict[str, str]:
    """Return the state (such as `queued` or `ok`) of each run in a runs folder, by the run's name."""
    return {status.run: status.state for status in read_run_statuses(runs)}


def _find_runs_in_state(
    states: Container[str], states_by_run: Mapping[str, str], launch: Launch
) -> list[Path]:
    """Return the folders of runs that are in one of the states and were submitted for this launch."""
    return [
        folder
        for folder in _find_candidate_folders(launch)
        if states_by_run.get(folder.name, "") in states and _was_submitted(folder, launch)
    ]


def _was_submitted(folder: Path, launch: Launch) -> bool:
    """Return True if the Slurm job of a run folder was submitted to train exactly this launch.

    The launch is compared with the record that was written when the job was submitted, because `run.json` describes
    the node that trained. A job that was requeued counts. A job that was resumed with other flags does not, nor does
    a folder whose records cannot be read.
    """
    job = read_job_record(folder)
    if job is None or job.submitted is None:
        return False
    try:
        submitted = decode_run(job.submitted)
        trainings = {identify_run(attempt).training for attempt in _read_attempts(folder)}
    except (OSError, ValueError):
        return False
    # `make resume` takes ITERS= and EXTRA=, with which an attempt trains something else.
    if len(trainings) != 1:
        return False
    if identify_run(submitted).training != identify_computation(launch):
        return False
    return submitted.entry == launch.entry and job.image == choose_image(launch)


def _find_candidate_folders(launch: Launch) -> list[Path]:
    """Return the run folders with this model and number of devices, newest first.

    The strategy in a folder's name does not decide, because a strategy has several names (`zero1` on two ranks is
    `dp2-zero1`); `run.json` says what was trained.
    """
    pattern = f"2*-{launch.model.name}-{launch.devices}{launch.spec.device}"
    return sorted(launch.job.options.runs.glob(pattern), reverse=True)


def _read_attempts(folder: Path) -> list[RunRecord]:
    """Return the record of each attempt of a run, oldest first; a run that was never resumed has one.

    Raises:
        OSError: A record is missing.
        msgspec.DecodeError: A record has another shape.
    """
    past = (folder / records.ATTEMPTS_FOLDER).glob("[0-9]*")
    earlier = sorted(past, key=lambda path: int(path.name))
    return [records.read_run(attempt) for attempt in (*earlier, folder)]


def _stands_for(folder: Path, identity: Identity) -> bool:
    """Return True if a run ended well, and each of its attempts can be used in place of a run with this identity.

    A folder whose records cannot be read gives False.
    """
    try:
        attempts, status = _read_attempts(folder), records.read_status(folder)
    except (OSError, ValueError):
        # msgspec's errors and a folder's name that is no number are ValueErrors.
        return False
    if status.status is not records.Status.OK:
        return False
    return all(identify_run(attempt).stands_for(identity) for attempt in attempts)
