"""The one loop that trains cells: a failed one does not stop the rest, what was made before is taken."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from tools.launch.compose import Launch
from tools.launch.execute import execute
from tools.launch.start import ensure_start_checkpoint
from tools.launch.supervise.exit_status import outcome
from tools.launch.supervise.warm import WarmPool
from tools.records.run import Status
from tools.spec.errors import LaunchError
from tools.spec.run import Backend
from tools.study.definition import Cell, Experiment
from tools.study.finished import finished_in_slurm, finished_runs, submit_missing
from tools.text.terminal import say

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
        steps = in_turn(cells)
        for done, (repeat, cell) in enumerate(steps, start=1):
            launch = self.launches[cell]
            title = self._title(cell, launch, cells.index(cell) + 1, repeat)
            if cell in self._failed:
                continue
            made = self._taken(cell, launch)
            if len(made) >= repeat:
                say(self.console, f"{title}: made before → {made[-repeat].name}")
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
        found, takes = [], self.experiment.takes_finished
        for cell, launch in self.launches.items():
            runs = self._taken(cell, launch) if takes else self._made.get(cell, [])[::-1]
            failure, folder = self._failed.get(cell, ("", None))
            failed = (folder,) if folder else ()
            found.append(CellResult(cell, launch, tuple(runs), failed, failure))
        return found

    def _taken(self, cell: Cell, launch: Launch) -> Sequence[Path]:
        if not self.experiment.takes_finished:
            return []
        in_slurm = launch.job.options.slurm is not None
        found = finished_in_slurm(launch) if in_slurm else finished_runs(launch)
        return found[: cell.repeats]

    def _train(self, cell: Cell, launch: Launch, title: str) -> str:
        began, folder = time.monotonic(), None
        try:
            launch = launch.forked(self._warm) if self.experiment.warm else launch
            ensure_start_checkpoint(launch, self.console)
            limited = replace(launch, time_limit_seconds=self.seconds_left)
            folder, status = execute(limited, launch.job.options.runs, self.console, title)
        except LaunchError as error:
            said = problem = str(error)
        else:
            said = outcome(folder, status)
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
        name = cell.name if self.experiment.skips_illegal or cell.label else short
        return f"[{number}/{len(self.launches)}]{which} {name}"


def in_turn(cells: Sequence[Cell]) -> list[tuple[int, Cell]]:
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
