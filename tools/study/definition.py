"""What an experiment is: cells, each with everything that its target is given, trained and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.launch.job import Job
from tools.launch.options import Options
from tools.spec.files import ROOT

FOLDER = ROOT / "examples" / "experiments"

SWEEP = "sweep"
"""The file whose axes a sweep has that has no file of its own; also the table of sweeps."""


@dataclass(frozen=True)
class Cell:
    """One thing to train, a number of times."""

    job: Job
    """With every variable, the caller's and the file's."""
    label: str = ""
    """What it is called, where strategy and backend do not tell cells apart."""
    why: str = ""
    """What it is measured for."""
    repeats: int = 1
    expected_seconds: float = 0.0
    """Of a run, while none was timed; an experiment with a time budget leaves out what does not fit."""

    @property
    def name(self) -> str:
        """In full, for people."""
        job = self.job
        backend = job.options.backend
        return self.label or f"{backend} {job.strategy} {job.model.name} {job.place}"


@dataclass(frozen=True)
class Experiment:
    """Cells that are trained and compared."""

    report: str
    """Folder of its results in `reports/`."""
    cells: tuple[Cell, ...]
    table: str = ""
    """What is made of the runs: a kind of table, as `commands.output_of` takes it."""
    takes_finished: bool = False
    """Whether a run that was made before is taken in place of another one."""
    skips_illegal: bool = False
    """Whether a cell that cannot work is left out; else it refuses the whole experiment."""
    instead: str = ""
    """What to run where this one is refused."""
    warm: bool = False
    """Whether ranks are forked from one process that has imported Megatron, where they can be."""
    budget_seconds: float | None = None
    """For all runs together; one that is not done by then is ended. None is no limit."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks."""
    left_out: tuple[str, ...] = ()
    """A sentence for each package that is not installed and the cells that need it."""

    @property
    def options(self) -> Options:
        """The first cell's, for what the caller says of all: DRY_RUN=, LAUNCHER=."""
        return self.cells[0].job.options
