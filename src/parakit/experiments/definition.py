"""What an experiment is: cells, each with everything that its target is given, trained and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from parakit.config.files import ROOT
from parakit.launch import Job, Options

FOLDER = ROOT / "examples" / "experiments"

SWEEP = "sweep"
"""The file whose axes a sweep has that has no file of its own; also the table of sweeps."""


VariableValue = str | int | float | bool
"""A make variable's value, as YAML has it."""


class ExperimentFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's keys; `examples/experiments/README.md` explains them."""

    report: str
    cells: list[str | dict[str, Any]]
    model: str = ""
    device: Literal["cpu", "gpu", "any"] = "any"
    devices: int = 2
    batch: Literal["strategy", "model", "model_each_rank"] = "strategy"
    defaults: dict[str, VariableValue] = {}
    on_cpu: dict[str, VariableValue] = {}
    on_gpu: dict[str, VariableValue] = {}
    on_models: dict[str, dict[str, VariableValue]] = {}
    fixed: dict[str, VariableValue] = {}
    bases: dict[str, dict[str, VariableValue]] = {}
    environment: dict[str, str] = {}
    warm: bool = False
    """Whether ranks are forked from one process that has imported Megatron, where they can be."""
    budget_seconds: float | None = None
    evaluation_batches: int | None = None
    repeats: int = 1
    repeats_change_seed: bool = False
    apart: bool = False
    takes_finished: bool = False
    """Whether a run that was made before is taken in place of another one."""
    skips_illegal: bool = False
    """Whether a cell that cannot work is left out; else it refuses the whole experiment."""
    table: str = ""
    """What is made of the runs: a kind of table, as `commands.output_of` takes it."""
    page: str = ""
    sentences: dict[str, str] = {}
    instead: str = ""
    packages: dict[str, str] = {}


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
        return self.label or f"{backend} {job.strategy} {job.model.name} {job.device_suffix}"


@dataclass(frozen=True)
class Experiment:
    """Cells that are trained and compared."""

    report: str
    """Folder of its results in `reports/`."""
    cells: tuple[Cell, ...]
    file: ExperimentFile
    budget_seconds: float | None = None
    """For all runs together; one that is not done by then is ended. None is no limit."""
    left_out: tuple[str, ...] = ()
    """A sentence for each package that is not installed and the cells that need it."""

    @property
    def options(self) -> Options:
        """The first cell's, for what the caller says of all: DRY_RUN=, LAUNCHER=."""
        return self.cells[0].job.options
