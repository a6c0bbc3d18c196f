"""The one loop that trains cells: a failed one does not stop the rest, what was made before is taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from tools.launch.compose import Launch
from tools.launch.execute import execute
from tools.launch.options import Options
from tools.launch.start import ensure_start_checkpoint
from tools.launch.supervise.warm import WarmMegatron
from tools.launch.train import outcome
from tools.records.run import Status
from tools.spec.errors import LaunchError
from tools.spec.run import Backend
from tools.study.definition import ExperimentCell
from tools.study.finished import finished_runs
from tools.text.terminal import say

Finished = Callable[[ExperimentCell, Launch], Sequence[Path]]
"""Runs of a cell that were made before and count, newest first."""

Judge = Callable[[ExperimentCell, Path | None, str], str]
"""Given the folder and the problem of a run that has ended, if it has them; why it does not count, or
has to be the cell's last, and nothing if it is good."""

NO_TIME = "no time was left for it"


@dataclass(frozen=True)
class CellResult:
    """What there is of one cell by now."""

    cell: ExperimentCell
    launch: Launch
    runs: tuple[Path, ...]
    """Run folders that ended well, newest first, at most as many as were wanted."""
    failed: tuple[Path, ...] = ()
    """Run folders of this call that did not."""
    failure: str = ""
    wanted: int = 1

    @property
    def folders(self) -> tuple[Path, ...]:
        """All of them."""
        return (*self.failed, *self.runs)

    @property
    def complete(self) -> bool:
        """Every repeat is there."""
        return len(self.runs) >= self.wanted


@dataclass
class Runner:
    """Trains cells in turn; `results` says at any time what there is, also after Ctrl-C."""

    cells: Sequence[tuple[ExperimentCell, Launch]]
    options: Options
    console: Console
    takes_finished: bool
    titles_in_full: bool = False
    """Whether cells differ in more than strategy and backend."""
    finished: Finished | None = None
    """How finished runs are found; None looks in `options.runs`."""
    judge: Judge | None = None
    """What becomes of each run as soon as it has ended; None takes those that ended well."""
    budget_seconds: float | None = None
    """For all runs from `train` on; what is not expected to be done in it is left out."""
    warm: bool = False
    """Whether ranks are forked from a process that has imported Megatron, where they can be."""
    _warm: WarmMegatron | None = None
    _longest_seconds: dict[int, float] = field(default_factory=dict)
    """Of the runs so far, by their number of iterations."""
    _began: float = field(default_factory=time.monotonic)
    _made: dict[ExperimentCell, list[Path]] = field(default_factory=dict)
    _failed: dict[ExperimentCell, tuple[str, Path | None]] = field(default_factory=dict)

    def train(self) -> None:
        """Train what is not there, while there is time.

        Raises:
            Interrupted: A request to stop came; the run that was on its way is complete on disk.
        """
        try:
            self._train_all()
        finally:
            if self._warm is not None:
                self._warm.close()

    def _train_all(self) -> None:
        launches, self._began = dict(self.cells), time.monotonic()
        steps = in_turn(list(launches), self.options.repeats)
        for done, (repeat, cell) in enumerate(steps, start=1):
            launch = launches[cell]
            title = self._title(cell, launch, list(launches).index(cell) + 1, repeat)
            if cell in self._failed:
                continue
            made = self._taken(cell, launch)
            if len(made) >= repeat:
                say(self.console, f"{title}: made before → {made[-repeat].name}")
                continue
            expected = self._longest_seconds.get(launch.iterations, cell.expected_seconds)
            if self.seconds_left is not None and expected > self.seconds_left:
                say(self.console, f"{title}: left out, {NO_TIME}; repeat the command.")
                if self.judge and repeat == 1:
                    self.judge(cell, None, NO_TIME)
                continue
            said = self._train(cell, launch, title)
            seconds = (time.monotonic() - self._began) / done * (len(steps) - done)
            left = f", about {seconds:.0f} s left" if done < len(steps) else ""
            say(self.console, f"{title}: {said}{left}")

    @property
    def seconds_left(self) -> float | None:
        """Of the budget, if there is one."""
        if self.budget_seconds is None:
            return None
        return self.budget_seconds - (time.monotonic() - self._began)

    def results(self) -> list[CellResult]:
        """One a cell, in order."""
        return [self._result(cell, launch) for cell, launch in self.cells]

    def _result(self, cell: ExperimentCell, launch: Launch) -> CellResult:
        runs = self._taken(cell, launch) if self.takes_finished else self._made.get(cell, [])[::-1]
        failure, folder = self._failed.get(cell, ("", None))
        failed = (folder,) if folder else ()
        return CellResult(cell, launch, tuple(runs), failed, failure, self._wanted(cell))

    def _wanted(self, cell: ExperimentCell) -> int:
        return cell.repeats or self.options.repeats

    def _taken(self, cell: ExperimentCell, launch: Launch) -> Sequence[Path]:
        if not self.takes_finished:
            return []
        found = (
            self.finished(cell, launch)
            if self.finished
            else finished_runs(launch, launch.job.options.runs)
        )
        return found[: self._wanted(cell)]

    def _train(self, cell: ExperimentCell, launch: Launch, title: str) -> str:
        began, folder = time.monotonic(), None
        try:
            launch = replace(launch, warm=self._warm_for(launch))
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
        if self.judge:
            problem = self.judge(cell, folder, problem)
            said = said if problem in said else f"{said}; {problem}"
        if problem:
            self._failed[cell] = problem, folder
        elif folder:
            self._made.setdefault(cell, []).append(folder)
        return said

    def _warm_for(self, launch: Launch) -> WarmMegatron | None:
        """The process that this launch's ranks may be forked from, started for the first of its kind."""
        if not (self.warm and launch.can_be_forked):
            return None
        wanted = launch.entry.path, launch.environment
        if self._warm is not None and not self._warm.serves(*wanted):
            self._warm.close()
            self._warm = None
        if self._warm is None:
            self._warm = WarmMegatron(*wanted)
        return self._warm

    def _title(self, cell: ExperimentCell, launch: Launch, number: int, repeat: int) -> str:
        which = f" repeat {repeat}" if self._wanted(cell) > 1 else ""
        other = launch.spec.backend != Backend.MEGATRON
        short = f"{launch.spec.backend} {cell.strategy}" if other else cell.strategy
        name = cell.name if self.titles_in_full or cell.label else short
        return f"[{number}/{len(self.cells)}]{which} {name}"


def in_turn(cells: Sequence[ExperimentCell], repeats: int = 1) -> list[tuple[int, ExperimentCell]]:
    """Every repeat of every cell, in the order in which they are trained.

    Repeats are apart, so that a slow drift falls on all cells alike. Cells with more repeats come before
    the others, because a median of one run has no scatter to judge others by.
    """
    wanted = {cell: cell.repeats or repeats for cell in cells}
    return [
        (repeat, cell)
        for number in sorted(set(wanted.values()), reverse=True)
        for repeat in range(1, number + 1)
        for cell in cells
        if wanted[cell] == number
    ]
