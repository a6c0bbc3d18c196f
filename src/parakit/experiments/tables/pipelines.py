"""Pipelines with flushes and without: losses, versions of the weights, bubble, time and memory."""

from __future__ import annotations

from collections.abc import Sequence

from parakit.config.strategy import PipelineSchedule
from parakit.costs import rank_parameters
from parakit.experiments.engine import Study, make_comparison
from parakit.experiments.tables import format_bullets, format_page, format_sentence
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.terminal import say
from parakit.formatting.units import DASH, joined, known, megabytes, percent
from parakit.reporting import Entry, format_time, ideal_bubble

LOSS_TOLERANCE = 1e-3
"""Losses of runs that compute the same differ by rounding, far less than this share."""


def render(model: str, rows: Sequence[Entry]) -> str:
    """Markdown: the table, and what follows for the framework survey's claims on PipeDream."""
    reference = next((row for row in rows if row.strategy == "baseline"), None)
    table = markdown_table(Table(_make_columns(reference), tuple(rows)))
    return format_page(
        "pipelines", model=model, table=table, claims=format_bullets(judge_claims(rows))
    )


def describe_wrong_losses(rows: Sequence[Entry]) -> list[str]:
    """A sentence for every pipeline that flushes and does not have the reference's losses."""
    reference, said = rows[0] if rows else None, []
    for row in rows:
        apart = _relative_loss_difference(row, reference)
        if not _get_schedule(row).is_asynchronous and (apart is None or apart > LOSS_TOLERANCE):
            parts = {"row": f"{row.backend} {row.strategy}", "reference": rows[0].strategy}
            said.append(format_sentence("pipelines", "differs", **parts, apart=apart or 0))
    return said


def judge_claims(rows: Sequence[Entry]) -> list[str]:
    """The framework survey's statements on PipeDream, each confirmed or contradicted by these runs."""
    found, said = {row.strategy: row for row in rows}, []

    def judge(name: str, is_so: bool = True, **parts: object) -> None:
        verdict = "confirmed" if is_so else "contradicted"
        said.append(format_sentence("pipelines", name, verdict=verdict, **parts))

    if (stashed := found.get("pipedream2")) and (versions := _count_weight_versions(stashed)):
        counts = " and ".join(f"{count:g}" for count in versions)
        judge("versions", versions[0] > 1, versions=counts)
    if stashed and (apart := _relative_loss_difference(stashed, rows[0])) is not None:
        parts = {
            "staleness": joined(_format_staleness(stashed).split()),
            "reference": rows[0].strategy,
        }
        judge("asynchronous", apart > LOSS_TOLERANCE, apart=apart, **parts)
    two, one = found.get("pipedream2bw"), found.get("pipedream-flush2")
    if two and one and two.peak_bytes and one.peak_bytes:
        held = {"without": megabytes(two.peak_bytes), "flushed": megabytes(one.peak_bytes)}
        judge("memory", two.peak_bytes > one.peak_bytes, **held)
    megatron = found.get("pp2")
    if megatron and megatron.spec and megatron.bubble is not None:
        judge("bubble", ideal=percent(ideal_bubble(megatron.spec)))
    return said


def _get_schedule(row: Entry) -> PipelineSchedule:
    return row.spec.parallelism.schedule if row.spec else PipelineSchedule.MEGATRON


def _relative_loss_difference(row: Entry, reference: Entry | None) -> float | None:
    """Largest difference of a loss to the reference's, as a share of it."""
    theirs = reference.losses if reference else {}
    both = theirs.keys() & row.losses.keys()
    shares = [abs(row.losses[i] / theirs[i] - 1) for i in both if theirs[i]]
    return max(shares, default=None)


def _count_weight_versions(row: Entry) -> list[float]:
    """How many times its parameters each stage holds; empty where that is not known."""
    spec = row.spec
    if spec is None or len(row.weight_bytes) != spec.parallelism.pipeline:
        return []
    return [
        size / (rank_parameters(spec, stage).total * spec.element_bytes)
        for stage, size in enumerate(row.weight_bytes)
    ]


def _format_staleness(row: Entry) -> str:
    stages = row.spec.parallelism.pipeline if row.spec else 0
    return " ".join(str(_get_schedule(row).staleness(stages, stage)) for stage in range(stages))


def _format_weight_bytes(row: Entry) -> str:
    each = zip(row.weight_bytes, _count_weight_versions(row), strict=False)
    return " ".join(f"{megabytes(size)} (×{versions:g})" for size, versions in each) or DASH


def _format_bubble(row: Entry) -> str:
    if row.bubble is None or row.spec is None:
        return DASH
    return f"{percent(row.bubble)} ({percent(ideal_bubble(row.spec))})"


def _make_columns(reference: Entry | None) -> tuple[Column[Entry], ...]:
    def losses(row: Entry) -> str:
        apart = _relative_loss_difference(row, reference)
        if apart is None or row is reference:
            return DASH if apart is None else "reference"
        judged = (
            ""
            if _get_schedule(row).is_asynchronous
            else " held"
            if apart <= LOSS_TOLERANCE
            else " broken"
        )
        return f"{apart:.1e}{judged}"

    return (
        Column("Pipeline", lambda row: f"{row.backend} {row.strategy}"),
        Column(
            "Schedule", lambda row: DASH if row.bubble is None else _get_schedule(row).paper_name
        ),
        Column("Status", lambda row: row.status),
        Column("Losses' distance", losses),
        Column("Final loss", lambda row: row.final_loss, known("{:.4f}")),
        Column("Staleness", _format_staleness),
        Column("Weights by stage", _format_weight_bytes),
        Column("Bubble (schedule's)", _format_bubble),
        Column("ms/iteration [95%]", lambda row: row.estimate, format_time),
        Column("Peak memory", lambda row: row.peak_bytes, megabytes),
    )


def _print_wrong_losses(study: Study) -> bool:
    """Whether those that flush do not hold the losses, which is said."""
    broken = describe_wrong_losses(study.rows)
    for text in broken:
        say(study.console, text, "red")
    return bool(broken)


OUTPUT = make_comparison(lambda study: render(study.model, study.rows), _print_wrong_losses)
