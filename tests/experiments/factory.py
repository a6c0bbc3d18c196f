"""Cells with times as a test wants them."""

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
    """On CPU ranks, with other options than the defaults where a test says so."""
    own = replace(options, **changes)  # type: ignore[arg-type]
    return Cell(Job(strategy, load_model(model), devices, DeviceKind.CPU, own), repeats=own.repeats)


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
    """Times of one percent's scatter about a median; None was never measured."""
    strategy = strategy or ("baseline" if devices == 1 else f"dp{devices}")
    samples = [milliseconds * (1 + 0.001 * n) for n in range(-10, 11)] if milliseconds else []
    row = report_row(strategy, backend=backend, samples_ms=samples) if samples else None
    one = cell(strategy, devices, model, backend=backend, **changes)
    # What was launched says how large the model and the batch are: Megatron's is soonest composed.
    launch = LAUNCHED(cell(strategy, devices, model, **changes).job)
    result = CellResult(one, launch, () if failure else (Path("run"),), failure=failure)
    return SweptCell(result, row, row.estimate if row else None)


def pair(*milliseconds: tuple[float, float], devices: int = 1) -> list[SweptCell]:
    """Megatron's and native's times at each of the sizes."""
    found = []
    for model, (megatron, native) in zip(SIZES, milliseconds, strict=False):
        found.append(measured(Backend.MEGATRON, megatron, model, devices))
        found.append(measured(Backend.NATIVE, native, model, devices))
    return found
