"""Tables of published figures and their predictions for two pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parakit.config.strategy import Batch, count_devices
from parakit.costs.memory import estimate_rank_memory
from parakit.formatting.table import Column, Table, markdown_rows, markdown_table
from parakit.formatting.units import MIB
from parakit.planner.readings.published import h200_figures, h200_spec, usual_cluster
from parakit.planner.time.iteration import iteration_seconds
from tests.planner.papers import Paper, load_paper, paper_specs


@dataclass(frozen=True)
class PublishedResidual:
    """A published figure and its prediction."""

    case: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error, positive if predicted too high."""
        return self.predicted / self.measured - 1


def paper_table() -> str:
    """Return Markdown tables of the papers' times."""
    paper = load_paper()
    return _table(f"{paper.source}, A100, s per iteration", paper_residuals(paper), 2)


def h200_tables() -> Iterator[str]:
    """Return Markdown tables of the gpt2-large runs: memory, times, and the predicted parts of the times."""
    yield _table("gpt2-large, H200, MiB per device", memory_residuals(), 0)
    yield _table("gpt2-large, H200, ms per iteration", h200_residuals(), 1)
    yield _parts_table()


def _parts_table() -> str:
    """Return the parts of runs without data parallelism, and of the pipeline with 16 micro batches."""
    specs = {f.strategy: h200_spec(f.strategy) for f in h200_figures()}
    specs = {
        name: spec
        for name, spec in specs.items()
        if spec.parallelism.data == 1 < count_devices(name)
    }
    specs["pp2, micro batches of 4"] = replace(h200_spec("pp2"), batch=Batch(4, 64))
    rows = []
    for name, spec in specs.items():
        seconds = iteration_seconds(spec, usual_cluster("h200", 2))
        exposed = seconds.tensor_parallel + seconds.context_parallel
        parts = (seconds.total, seconds.matmul, exposed, seconds.pipeline_messages, seconds.bubble)
        stages = range(spec.parallelism.pipeline)
        held = (f"{estimate_rank_memory(spec, stage).total / MIB:,.0f}" for stage in stages)
        rows.append([name, *(f"{1e3 * part:.1f}" for part in parts), ", ".join(held)])
    names = (
        "iteration",
        "matrix products",
        "exposed TP or CP",
        "messages",
        "bubble",
        "MiB per stage",
    )
    return markdown_rows(["gpt2-large, H200, predicted ms", *names], rows)


def memory_residuals() -> list[PublishedResidual]:
    """Return memory in MiB per device, one row per pipeline stage; ranks that agree to 10 MiB are one row."""
    residuals = []
    for figure in h200_figures():
        spec = h200_spec(figure.strategy)
        readings = {round(reading, -1): reading for reading in reversed(figure.device_memory_mib)}
        stages = spec.parallelism.pipeline
        for index, measured in enumerate(reversed(readings.values())):
            stage = index if stages > 1 else 0
            case = f"{figure.strategy}, stage {stage}" if stages > 1 else figure.strategy
            residuals.append(
                PublishedResidual(case, measured, estimate_rank_memory(spec, stage).total / MIB)
            )
    return residuals


def h200_residuals() -> list[PublishedResidual]:
    """Return milliseconds per iteration, one row per published run."""
    residuals = []
    for figure in h200_figures():
        assert figure.mean_iteration_ms is not None
        cluster = usual_cluster("h200", figure.devices)
        seconds = iteration_seconds(h200_spec(figure.strategy), cluster).total
        residuals.append(
            PublishedResidual(figure.strategy, figure.mean_iteration_ms, 1e3 * seconds)
        )
    return residuals


def paper_residuals(paper: Paper) -> list[PublishedResidual]:
    """Return seconds per iteration, two rows per case of the paper."""
    residuals = []
    for case in paper.cases:
        devices = case.tensor * case.pipeline
        cluster = usual_cluster(paper.device, devices)
        full, selective = paper_specs(paper, case)
        for spec, measured, recomputation in (
            (full, case.full_seconds, "full recomputation"),
            (selective, case.selective_seconds, "SP, selective"),
        ):
            predicted = iteration_seconds(spec, cluster).total
            residuals.append(
                PublishedResidual(f"{case.name} on {devices}, {recomputation}", measured, predicted)
            )
    return residuals


def _table(title: str, residuals: list[PublishedResidual], digits: int) -> str:
    def rounded(value: float) -> str:
        return f"{value:.{digits}f}"

    columns = (
        Column[PublishedResidual](title, lambda residual: residual.case, right=False),
        Column[PublishedResidual]("measured", lambda residual: residual.measured, rounded),
        Column[PublishedResidual]("predicted", lambda residual: residual.predicted, rounded),
        Column[PublishedResidual]("error", lambda residual: residual.error, "{:+.1%}".format),
    )
    return markdown_table(Table(columns, tuple(residuals)))
