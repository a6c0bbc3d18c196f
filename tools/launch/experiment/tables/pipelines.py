"""Pipelines with flushes and without: losses, versions of the weights, bubble, time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.launch.experiment.measured import Measured, time_text
from tools.launch.experiment.tables import bullets, page
from tools.plan.tensors import rank_parameters
from tools.spec.run import RunSpec
from tools.spec.strategy import PipelineSchedule
from tools.text.table import Column, Table, markdown_table
from tools.text.units import DASH, joined, megabytes, percent

CLOSE = 1e-3
"""Losses of runs that compute the same differ by rounding, far less than this share."""


def render(model: str, runs: Sequence[Measured]) -> str:
    """Markdown: the table, and what follows for the framework survey's claims on PipeDream."""
    reference = next((run for run in runs if run.strategy == "baseline"), None)
    rows = tuple(_Trained(run, reference) for run in runs)
    table = markdown_table(Table(_COLUMNS, rows))
    return page("pipelines", model=model, table=table, claims=bullets(claims(runs)))


def disagreements(runs: Sequence[Measured]) -> list[str]:
    """A sentence for every pipeline that flushes and does not have the reference's losses."""
    rows = [_Trained(run, runs[0]) for run in runs]
    return [
        f"{row.run.backend} {row.run.strategy} flushes, and its losses differ from "
        f"{runs[0].strategy}'s by up to {row.distance or 0:.2g} of the loss."
        for row in rows
        if not row.schedule.is_asynchronous and (row.distance is None or row.distance > CLOSE)
    ]


def claims(runs: Sequence[Measured]) -> list[str]:
    """The framework survey's statements on PipeDream, each confirmed or contradicted by these runs."""
    found = {run.strategy: run for run in runs}
    stashed, megatron = found.get("pipedream2"), found.get("pp2")
    sentences = []
    if stashed and stashed.spec and stashed.weight_bytes:
        versions = _versions(stashed.spec, stashed.weight_bytes)
        sentences.append(
            f"“Weight versioning”: {_verdict(versions[0] > 1)}; PipeDream's stages hold "
            f"{' and '.join(f'{count:g}' for count in versions)} version(s) of their weights."
        )
    if stashed and (distance := _Trained(stashed, runs[0]).distance) is not None:
        ages = _staleness(_Trained(stashed, runs[0])).split()
        sentences.append(
            f"“Asynchronous execution”: {_verdict(distance > CLOSE)}; each stage's gradient is of "
            f"weights that are p − s − 1 updates old, here {joined(ages)}, and the losses differ from "
            f"{runs[0].strategy}'s by up to {distance:.1e} of the loss."
        )
    two, one = found.get("pipedream2bw"), found.get("pipedream-flush2")
    if two and one and two.peak_bytes and one.peak_bytes:
        sentences.append(
            f"“Memory usage higher”: {_verdict(two.peak_bytes > one.peak_bytes)}; of the same micro "
            f"batches the fullest stage holds {megabytes(two.peak_bytes)} without flushes and "
            f"{megabytes(one.peak_bytes)} with them."
        )
    if megatron and megatron.ideal_bubble:
        sentences.append(
            "“Bubble 5–10%, Megatron's 10–15%”: cannot be judged without a number of micro batches. "
            f"Megatron's is (p−1)/m of the work, here {percent(megatron.ideal_bubble)}; PipeDream pays "
            "its own once, when the pipeline fills."
        )
    return sentences


def _verdict(is_so: bool) -> str:
    return "confirmed" if is_so else "contradicted"


@dataclass(frozen=True)
class _Trained:
    run: Measured
    reference: Measured | None

    @property
    def schedule(self) -> PipelineSchedule:
        return self.run.spec.parallelism.schedule if self.run.spec else PipelineSchedule.MEGATRON

    @property
    def distance(self) -> float | None:
        """Largest difference of a loss to the reference's, as a share of it."""
        theirs = self.reference.losses if self.reference else {}
        both = theirs.keys() & self.run.losses.keys()
        shares = [abs(self.run.losses[i] / theirs[i] - 1) for i in both if theirs[i]]
        return max(shares, default=None)


def _versions(spec: RunSpec, held: Sequence[int]) -> list[float]:
    """How many times its parameters each stage holds."""
    return [
        size / (rank_parameters(spec, stage).total * spec.element_bytes)
        for stage, size in enumerate(held)
    ]


def _of_stages(spec: RunSpec | None) -> range:
    return range(spec.parallelism.pipeline if spec else 0)


def _losses(row: _Trained) -> str:
    if row.distance is None:
        return DASH
    if row.run is row.reference:
        return "reference"
    judged = "" if row.schedule.is_asynchronous else " held" if row.distance <= CLOSE else " broken"
    return f"{row.distance:.1e}{judged}"


def _staleness(row: _Trained) -> str:
    spec = row.run.spec
    ages = [row.schedule.staleness(len(_of_stages(spec)), stage) for stage in _of_stages(spec)]
    return " ".join(map(str, ages))


def _weights(row: _Trained) -> str:
    spec, held = row.run.spec, row.run.weight_bytes
    if spec is None or len(held) != spec.parallelism.pipeline:
        return DASH
    return " ".join(
        f"{megabytes(size)} (×{versions:g})"
        for size, versions in zip(held, _versions(spec, held), strict=True)
    )


def _bubble(row: _Trained) -> str:
    if row.run.bubble is None or row.run.ideal_bubble is None:
        return DASH
    return f"{percent(row.run.bubble)} ({percent(row.run.ideal_bubble)})"


_COLUMNS: tuple[Column[_Trained], ...] = (
    Column("Pipeline", lambda row: f"{row.run.backend} {row.run.strategy}"),
    Column("Schedule", lambda row: row.schedule.paper_name if row.run.bubble is not None else DASH),
    Column("Status", lambda row: row.run.status),
    Column("Losses' distance", _losses),
    Column(
        "Final loss", lambda row: row.run.final_loss, lambda x: DASH if x is None else f"{x:.4f}"
    ),
    Column("Staleness", _staleness),
    Column("Weights by stage", _weights),
    Column("Bubble (schedule's)", _bubble),
    Column("ms/iteration [95%]", lambda row: row.run.estimate, time_text),
    Column("Peak memory", lambda row: row.run.peak_bytes, megabytes),
)
