"""What was measured of each cell, and of each backend's best on a number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.launch.compose import Launch
from tools.launch.sweep.cells import Cell
from tools.plan.tensors import parameters_total
from tools.report.analyse.statistics import Comparison, Estimate, compare, estimate
from tools.report.read.runs import load_folder
from tools.spec.run import Backend, DeviceKind

Devices = tuple[int, DeviceKind]


@dataclass(frozen=True)
class Measured:
    """One cell."""

    cell: Cell
    parameters: int
    tokens_per_iteration: int
    estimate: Estimate | None
    """Of iteration times, in milliseconds, repeats pooled."""
    runs: tuple[Path, ...] = ()
    """Newest first."""
    complete: bool = True
    """All repeats are there."""
    failure: str = ""
    final_loss: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Over all devices, at the median iteration."""
        return self._rate(self.estimate.median) if self.estimate else None

    @property
    def rate_interval(self) -> tuple[float, float] | None:
        """95% interval of the same."""
        found = self.estimate
        if found is None or found.low is None or found.high is None:
            return None
        return self._rate(found.high), self._rate(found.low)

    def _rate(self, milliseconds: float) -> float:
        return self.tokens_per_iteration * 1000 / milliseconds


def measure(
    cell: Cell, launch: Launch, folders: Sequence[Path], repeats: int, failure: str = ""
) -> Measured:
    """Pool the runs of a cell."""
    runs = [load_folder(folder) for folder in folders]
    losses = [line.lm_loss for run in runs[:1] for line in run.log.iterations]
    return Measured(
        cell=cell,
        parameters=parameters_total(launch.model.shape),
        tokens_per_iteration=launch.spec.batch.global_batch_size * launch.model.shape.seq_length,
        estimate=estimate([run.window.samples_ms for run in runs]),
        runs=tuple(folders),
        complete=len(folders) >= repeats,
        failure=failure,
        final_loss=losses[-1] if losses else None,
    )


def fastest(results: Sequence[Measured]) -> dict[tuple[Devices, Backend], list[Measured]]:
    """For each number of devices and backend its fastest strategy at every size, small ones first."""
    best: dict[tuple[Devices, Backend, str], Measured] = {}
    for result in results:
        rate, cell = result.tokens_per_second, result.cell
        if rate is None:
            continue
        key = (cell.devices, cell.device), cell.backend, cell.model
        if key not in best or rate > (best[key].tokens_per_second or 0):
            best[key] = result
    lines: dict[tuple[Devices, Backend], list[Measured]] = {}
    for (devices, backend, _), result in best.items():
        lines.setdefault((devices, backend), []).append(result)
    return {key: sorted(line, key=lambda one: one.parameters) for key, line in lines.items()}


def compare_tokens(reference: Measured, other: Measured) -> Comparison | None:
    """Time a token of the second over the first's; None where one has no times."""
    if reference.estimate is None or other.estimate is None:
        return None
    weight = reference.tokens_per_iteration / other.tokens_per_iteration
    return compare(reference.estimate, other.estimate, weight)
