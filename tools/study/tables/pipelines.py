"""Pipelines with flushes and without: losses, versions of the weights, bubble, time and memory."""

from __future__ import annotations

from collections.abc import Sequence

from tools.plan.tensors import rank_parameters
from tools.report.analyse.entry import Entry
from tools.report.explain.predicted import ideal_bubble
from tools.report.render.tables import time_text
from tools.spec.strategy import PipelineSchedule
from tools.study.tables import bullets, known, page
from tools.text.table import Column, Table, markdown_table
from tools.text.units import DASH, joined, megabytes, percent

CLOSE = 1e-3
"""Losses of runs that compute the same differ by rounding, far less than this share."""


def render(model: str, rows: Sequence[Entry]) -> str:
    """Markdown: the table, and what follows for the framework survey's claims on PipeDream."""
    reference = next((row for row in rows if row.strategy == "baseline"), None)
    table = markdown_table(Table(_columns(reference), tuple(rows)))
    return page("pipelines", model=model, table=table, claims=bullets(claims(rows)))


def disagreements(rows: Sequence[Entry]) -> list[str]:
    """A sentence for every pipeline that flushes and does not have the reference's losses."""
    reference = rows[0] if rows else None
    return [
        f"{row.backend} {row.strategy} flushes, and its losses differ from "
        f"{rows[0].strategy}'s by up to {apart or 0:.2g} of the loss."
        for row in rows
        if not _schedule(row).is_asynchronous
        and ((apart := _distance(row, reference)) is None or apart > CLOSE)
    ]


def claims(rows: Sequence[Entry]) -> list[str]:
    """The framework survey's statements on PipeDream, each confirmed or contradicted by these runs."""
    found = {row.strategy: row for row in rows}
    stashed, megatron = found.get("pipedream2"), found.get("pp2")
    sentences = []
    if stashed and (versions := _versions(stashed)):
        sentences.append(
            f"“Weight versioning”: {_verdict(versions[0] > 1)}; PipeDream's stages hold "
            f"{' and '.join(f'{count:g}' for count in versions)} versions of their weights."
        )
    if stashed and (apart := _distance(stashed, rows[0])) is not None:
        sentences.append(
            f"“Asynchronous execution”: {_verdict(apart > CLOSE)}; each stage's gradient is of "
            f"weights that are p − s − 1 updates old, here {joined(_staleness(stashed).split())}, and "
            f"the losses differ from {rows[0].strategy}'s by up to {apart:.1e} of the loss."
        )
    two, one = found.get("pipedream2bw"), found.get("pipedream-flush2")
    if two and one and two.peak_bytes and one.peak_bytes:
        sentences.append(
            f"“Memory usage higher”: {_verdict(two.peak_bytes > one.peak_bytes)}; of the same micro "
            f"batches the fullest stage holds {megabytes(two.peak_bytes)} without flushes and "
            f"{megabytes(one.peak_bytes)} with them."
        )
    if megatron and megatron.spec and megatron.bubble is not None:
        sentences.append(
            "“Bubble 5–10%, Megatron's 10–15%”: cannot be judged without a number of micro batches. "
            f"Megatron's is (p−1)/m of the work, here {percent(ideal_bubble(megatron.spec))}; PipeDream "
            "pays its own once, when the pipeline fills."
        )
    return sentences


def _verdict(is_so: bool) -> str:
    return "confirmed" if is_so else "contradicted"


def _schedule(row: Entry) -> PipelineSchedule:
    return row.spec.parallelism.schedule if row.spec else PipelineSchedule.MEGATRON


def _distance(row: Entry, reference: Entry | None) -> float | None:
    """Largest difference of a loss to the reference's, as a share of it."""
    theirs = reference.losses if reference else {}
    both = theirs.keys() & row.losses.keys()
    shares = [abs(row.losses[i] / theirs[i] - 1) for i in both if theirs[i]]
    return max(shares, default=None)


def _versions(row: Entry) -> list[float]:
    """How many times its parameters each stage holds; empty where that is not known."""
    spec = row.spec
    if spec is None or len(row.weight_bytes) != spec.parallelism.pipeline:
        return []
    return [
        size / (rank_parameters(spec, stage).total * spec.element_bytes)
        for stage, size in enumerate(row.weight_bytes)
    ]


def _staleness(row: Entry) -> str:
    stages = row.spec.parallelism.pipeline if row.spec else 0
    return " ".join(str(_schedule(row).staleness(stages, stage)) for stage in range(stages))


def _weights(row: Entry) -> str:
    each = zip(row.weight_bytes, _versions(row), strict=False)
    return " ".join(f"{megabytes(size)} (×{versions:g})" for size, versions in each) or DASH


def _bubble(row: Entry) -> str:
    if row.bubble is None or row.spec is None:
        return DASH
    return f"{percent(row.bubble)} ({percent(ideal_bubble(row.spec))})"


def _columns(reference: Entry | None) -> tuple[Column[Entry], ...]:
    def losses(row: Entry) -> str:
        apart = _distance(row, reference)
        if apart is None or row is reference:
            return DASH if apart is None else "reference"
        judged = "" if _schedule(row).is_asynchronous else " held" if apart <= CLOSE else " broken"
        return f"{apart:.1e}{judged}"

    return (
        Column("Pipeline", lambda row: f"{row.backend} {row.strategy}"),
        Column("Schedule", lambda row: DASH if row.bubble is None else _schedule(row).paper_name),
        Column("Status", lambda row: row.status),
        Column("Losses' distance", losses),
        Column("Final loss", lambda row: row.final_loss, known("{:.4f}")),
        Column("Staleness", _staleness),
        Column("Weights by stage", _weights),
        Column("Bubble (schedule's)", _bubble),
        Column("ms/iteration [95%]", lambda row: row.estimate, time_text),
        Column("Peak memory", lambda row: row.peak_bytes, megabytes),
    )
