"""The one loop that trains cells: a failed one does not stop the rest, what was made before is taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from tools.launch.compose import Launch
from tools.launch.errors import LaunchError
from tools.launch.execute import execute
from tools.launch.experiment.cells import cell_options
from tools.launch.experiment.definition import Cell
from tools.launch.experiment.finished import finished_runs
from tools.launch.options import Options
from tools.launch.start import ensure_start_checkpoint
from tools.launch.train import outcome
from tools.records.run import Status
from tools.spec.run import Backend

Finished = Callable[[Launch], list[Path]]
"""Runs of a cell that were made before and ended well, newest first."""


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

    cells: Sequence[tuple[Cell, Launch]]
    options: Options
    console: Console
    takes_finished: bool
    titles_in_full: bool = False
    """Whether cells differ in more than strategy and backend."""
    finished: Finished | None = None
    """How finished runs are found; None looks in `options.runs`."""
    _made: dict[Cell, list[Path]] = field(default_factory=dict)
    _failed: dict[Cell, tuple[str, Path | None]] = field(default_factory=dict)

    def train(self) -> None:
        """Train what is not there. Repeats are apart, so that a slow drift falls on all cells alike.

        Raises:
            Interrupted: A request to stop came; the run that was on its way is complete on disk.
        """
        total, began = len(self.cells) * self.options.repeats, time.monotonic()
        for repeat in range(1, self.options.repeats + 1):
            for number, (cell, launch) in enumerate(self.cells, start=1):
                if cell in self._failed:
                    continue
                title = self._title(cell, launch, number, repeat)
                made = self._taken(launch)
                if len(made) >= repeat:
                    say(self.console, f"{title}: made before → {made[-repeat].name}")
                    continue
                said = self._train(cell, launch, title)
                ended = (repeat - 1) * len(self.cells) + number
                seconds = (time.monotonic() - began) / ended * (total - ended)
                left = f", about {seconds:.0f} s left" if ended < total else ""
                say(self.console, f"{title}: {said}{left}")

    def results(self) -> list[CellResult]:
        """One a cell, in order."""
        return [self._result(cell, launch) for cell, launch in self.cells]

    def _result(self, cell: Cell, launch: Launch) -> CellResult:
        runs = self._taken(launch) if self.takes_finished else self._made.get(cell, [])[::-1]
        failure, folder = self._failed.get(cell, ("", None))
        failed = (folder,) if folder else ()
        return CellResult(cell, launch, tuple(runs), failed, failure, self.options.repeats)

    def _taken(self, launch: Launch) -> list[Path]:
        if not self.takes_finished:
            return []
        find = self.finished or (lambda one: finished_runs(one, self.options.runs))
        return find(launch)[: self.options.repeats]

    def _train(self, cell: Cell, launch: Launch, title: str) -> str:
        try:
            own = cell_options(cell, self.options)
            ensure_start_checkpoint(launch, own, self.console)
            folder, status = execute(launch, self.options.runs, self.console, title)
        except LaunchError as error:
            self._failed[cell] = str(error), None
            return str(error)
        if status.status is Status.OK:
            self._made.setdefault(cell, []).append(folder)
        else:
            self._failed[cell] = f"{status.status}: {status.reason}", folder
        return outcome(folder, status)

    def _title(self, cell: Cell, launch: Launch, number: int, repeat: int) -> str:
        which = f" repeat {repeat}" if self.options.repeats > 1 else ""
        other = launch.spec.backend != Backend.MEGATRON
        short = f"{launch.spec.backend} {cell.strategy}" if other else cell.strategy
        name = cell.name if self.titles_in_full else short
        return f"[{number}/{len(self.cells)}]{which} {name}"


def say(console: Console, text: str, style: str | None = None) -> None:
    """A line on the terminal, as it is."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
