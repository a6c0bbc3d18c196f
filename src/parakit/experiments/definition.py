"""Define experiments: cells, each with all variables of its make target, that are trained and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from parakit.config.files import ROOT
from parakit.launch import Job, Options

FOLDER = ROOT / "examples" / "experiments"

SWEEP = "sweep"
"""Name of the file with the default axes of a sweep, and of the table that sweeps make."""


VariableValue = str | int | float | bool
"""Value of a make variable in YAML."""


class ExperimentFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of an experiment's file; `examples/experiments/README.md` explains them."""

    report: str
    cells: list[str | dict[str, Any]]
    model: str = ""
    device: Literal["cpu", "gpu", "any"] = "any"
    devices: int = 2
    batch: Literal["target", "model_each_rank"] = "target"
    defaults: dict[str, VariableValue] = {}
    on_cpu: dict[str, VariableValue] = {}
    on_gpu: dict[str, VariableValue] = {}
    on_models: dict[str, dict[str, VariableValue]] = {}
    fixed: dict[str, VariableValue] = {}
    bases: dict[str, dict[str, VariableValue]] = {}
    environment: dict[str, str] = {}
    warm: bool = False
    """Whether ranks are forked from one process that has imported Megatron, where that is possible."""
    budget_seconds: float | None = None
    evaluation_batches: int | None = None
    repeats: int = 1
    repeats_change_seed: bool = False
    apart: bool = False
    takes_finished: bool = False
    """Whether a run that was made before counts, so that it is not trained again."""
    skips_illegal: bool = False
    """Whether a cell that cannot work is skipped; otherwise the whole experiment is refused."""
    table: str = ""
    """Kind of table that is made from the runs, as `commands.find_output` takes it."""
    page: str = ""
    sentences: dict[str, str] = {}
    instead: str = ""
    packages: dict[str, str] = {}


@dataclass(frozen=True)
class Cell:
    """A job that is trained a number of times."""

    job: Job
    """Job with all variables, the caller's and the file's."""
    label: str = ""
    """Name, if strategy and backend do not distinguish the cells; else empty."""
    why: str = ""
    """Purpose of the measurement."""
    repeats: int = 1
    expected_seconds: float = 0.0
    """Expected seconds of a run as long as none was timed.

    An experiment with a time budget leaves out runs that do not fit.
    """

    @property
    def name(self) -> str:
        """Label, or else backend, strategy, model and devices."""
        job = self.job
        backend = job.options.backend
        return self.label or f"{backend} {job.strategy} {job.model.name} {job.device_suffix}"


@dataclass(frozen=True)
class Experiment:
    """Cells that are trained and compared."""

    report: str
    """Name of the folder of its results in `reports/`."""
    cells: tuple[Cell, ...]
    file: ExperimentFile
    budget_seconds: float | None = None
    """Time limit for all runs together; a run that exceeds it is ended. None is no limit."""
    left_out: tuple[str, ...] = ()
    """A sentence for each package that is not installed and the cells that need it."""

    @property
    def options(self) -> Options:
        """Options of the first cell, for variables that are equal in all cells: DRY_RUN=, LAUNCHER=."""
        return self.cells[0].job.options
