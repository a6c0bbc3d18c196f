"""Factory of cells with given times."""

import functools
from dataclasses import replace
from pathlib import Path

from parakit.config.model import load_model
from parakit.config.run import Backend, DeviceKind
from parakit.experiments.definition import Cell
from parakit.experiments.runner import CellResult
from parakit.experiments.tables.overtaking import SweptCell
from parakit.launch.job import Job
from parakit.launch.options import NO_OPTIONS, Options
from parakit.launch.train import compose_job
from tests.reporting.factory import report_row


def cell(
    strategy: str,
    devices: int = 2,
    model: str = "gpt2-tiny",
    options: Options = NO_OPTIONS,
    **changes: object,
) -> Cell:
    """Return a cell on CPU ranks. `changes` replace default options."""
    cell_options = replace(options, **changes)  # type: ignore[arg-type]
    return Cell(
        Job(strategy, load_model(model), devices, DeviceKind.CPU, cell_options),
        repeats=cell_options.repeats,
    )


SIZES = ("gpt2-tiny", "gpt3-64m", "gpt3-355m")
LAUNCHED = functools.cache(compose_job)


def measured(
    backend: Backend,
    milliseconds: float | None,
    model: str = "gpt2-tiny",
    devices: int = 1,
    strategy: str = "",
    failure: str = "",
    **changes: object,
) -> SweptCell:
    """Return a cell with times that scatter by 1% around a median. None stands for a cell that was not measured."""
    strategy = strategy or ("baseline" if devices == 1 else f"dp{devices}")
    samples = [milliseconds * (1 + 0.001 * n) for n in range(-10, 11)] if milliseconds else []
    row = report_row(strategy, backend=backend, samples_ms=samples) if samples else None
    timed_cell = cell(strategy, devices, model, backend=backend, **changes)
    # The launch states the sizes of model and batch. Megatron's launch is the fastest to compose.
    launch = LAUNCHED(cell(strategy, devices, model, **changes).job)
    result = CellResult(timed_cell, launch, () if failure else (Path("run"),), failure=failure)
    return SweptCell(result, row, row.estimate if row else None)


def pair(*milliseconds: tuple[float, float], devices: int = 1) -> list[SweptCell]:
    """Return cells of Megatron and native with (Megatron, native) milliseconds for each model size."""
    cells = []
    for model, (megatron, native) in zip(SIZES, milliseconds, strict=False):
        cells.append(measured(Backend.MEGATRON, megatron, model, devices))
        cells.append(measured(Backend.NATIVE, native, model, devices))
    return cells
