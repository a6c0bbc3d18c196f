"""Compare pipelines with and without flushes: losses, weight versions, bubble, time and memory.

A pipeline with flushes computes what one device computes. A pipeline without flushes (asynchronous, as PipeDream)
computes with stale weights. Each stage may hold several versions of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from parakit.config.strategy import PipelineSchedule
from parakit.costs import rank_parameters
from parakit.experiments.engine import Study, make_comparison
from parakit.experiments.tables import format_bullets, format_page, format_sentence
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.terminal import say
from parakit.formatting.units import DASH, joined, known, megabytes, percent
from parakit.reporting import Entry, format_time, ideal_bubble

LOSS_TOLERANCE = 1e-3
"""Largest relative difference of losses that rounding explains, with a wide margin."""


def render(model: str, rows: Sequence[Entry]) -> str:
    """Return the page in Markdown: the table, and a verdict on the framework survey's claims on PipeDream."""
    reference = next((row for row in rows if row.strategy == "baseline"), None)
    table = markdown_table(Table(_make_columns(reference), tuple(rows)))
    claims = format_bullets(judge_claims(rows))
    return format_page("pipelines", model=model, table=table, claims=claims)


def describe_wrong_losses(rows: Sequence[Entry]) -> list[str]:
    """Return a sentence for each pipeline with flushes whose losses differ from those of the first row."""
    sentences = []
    for row in rows:
        reference = rows[0]
        if _get_schedule(row).is_asynchronous:
            continue
        difference = _relative_loss_difference(row, reference)
        if difference is None or difference > LOSS_TOLERANCE:
            sentence = format_sentence(
                "pipelines",
                "differs",
                row=f"{row.backend} {row.strategy}",
                reference=reference.strategy,
                apart=difference or 0,
            )
            sentences.append(sentence)
    return sentences


def judge_claims(rows: Sequence[Entry]) -> list[str]:
    """Return a sentence per claim of the framework survey on PipeDream: confirmed or contradicted.

    Claims whose runs or measurements are missing give no sentence. The first row is the reference of losses.
    """
    rows_by_strategy = {row.strategy: row for row in rows}
    sentences: list[str] = []
    pipedream = rows_by_strategy.get("pipedream2")
    if pipedream:
        sentences += _judge_pipedream(pipedream, reference=rows[0])
    without_flush = rows_by_strategy.get("pipedream2bw")
    flushed = rows_by_strategy.get("pipedream-flush2")
    if without_flush and flushed and without_flush.peak_bytes and flushed.peak_bytes:
        sentence = _format_claim(
            "memory",
            is_confirmed=without_flush.peak_bytes > flushed.peak_bytes,
            without=megabytes(without_flush.peak_bytes),
            flushed=megabytes(flushed.peak_bytes),
        )
        sentences.append(sentence)
    megatron = rows_by_strategy.get("pp2")
    if megatron and megatron.spec and megatron.bubble is not None:
        ideal = percent(ideal_bubble(megatron.spec))
        sentences.append(_format_claim("bubble", is_confirmed=True, ideal=ideal))
    return sentences


def _judge_pipedream(pipedream: Entry, reference: Entry) -> list[str]:
    """Return sentences on two claims: that PipeDream stores several weights, and that it trains other losses.

    A claim without measurements gives no sentence.
    """
    sentences = []
    versions = _count_weight_versions(pipedream)
    if versions:
        counts = " and ".join(f"{count:g}" for count in versions)
        stores_several = versions[0] > 1  # The first stage stores the most.
        sentences.append(_format_claim("versions", is_confirmed=stores_several, versions=counts))
    difference = _relative_loss_difference(pipedream, reference)
    if difference is not None:
        sentence = _format_claim(
            "asynchronous",
            is_confirmed=difference > LOSS_TOLERANCE,
            apart=difference,
            staleness=joined(_format_staleness(pipedream).split()),
            reference=reference.strategy,
        )
        sentences.append(sentence)
    return sentences


def _format_claim(name: str, *, is_confirmed: bool, **parts: object) -> str:
    """Return the sentence on a claim of the survey, with its verdict; `parts` fill the sentence."""
    verdict = "confirmed" if is_confirmed else "contradicted"
    return format_sentence("pipelines", name, verdict=verdict, **parts)


def _get_schedule(row: Entry) -> PipelineSchedule:
    """Return the pipeline schedule of a row; Megatron's if the row has no specification."""
    return row.spec.parallelism.schedule if row.spec else PipelineSchedule.MEGATRON


def _relative_loss_difference(row: Entry, reference: Entry | None) -> float | None:
    """Return the largest relative difference of losses to the reference's; None if no iteration is shared."""
    reference_losses = reference.losses if reference else {}
    shared = reference_losses.keys() & row.losses.keys()
    differences = [
        abs(row.losses[iteration] / reference_losses[iteration] - 1)
        for iteration in shared
        if reference_losses[iteration]
    ]
    return max(differences, default=None)


def _count_weight_versions(row: Entry) -> list[float]:
    """Return, for each stage, how many versions of its weights it stores; empty if the bytes are not known."""
    spec = row.spec
    if spec is None or len(row.weight_bytes) != spec.parallelism.pipeline:
        return []
    return [
        size / (rank_parameters(spec, stage).total * spec.element_bytes)
        for stage, size in enumerate(row.weight_bytes)
    ]


def _format_staleness(row: Entry) -> str:
    """Return the staleness of each stage's weights in updates, such as `1 0`."""
    num_stages = row.spec.parallelism.pipeline if row.spec else 0
    schedule = _get_schedule(row)
    return " ".join(str(schedule.staleness(num_stages, stage)) for stage in range(num_stages))


def _format_weight_bytes(row: Entry) -> str:
    """Return each stage's bytes of weights and number of versions, such as `12 MB (×2) 12 MB (×1)`."""
    stages = zip(row.weight_bytes, _count_weight_versions(row), strict=False)
    return " ".join(f"{megabytes(size)} (×{versions:g})" for size, versions in stages) or DASH


def _format_bubble(row: Entry) -> str:
    """Return the measured bubble and, in brackets, that of the schedule with equal stages."""
    if row.bubble is None or row.spec is None:
        return DASH
    return f"{percent(row.bubble)} ({percent(ideal_bubble(row.spec))})"


def _make_columns(reference: Entry | None) -> tuple[Column[Entry], ...]:
    """Return the table's columns; losses are compared with the reference's."""

    def format_losses(row: Entry) -> str:
        difference = _relative_loss_difference(row, reference)
        if difference is None:
            return DASH
        if row is reference:
            return "reference"
        text = f"{difference:.1e}"
        if _get_schedule(row).is_asynchronous:
            return text  # Other losses are no fault of these pipelines.
        return f"{text} held" if difference <= LOSS_TOLERANCE else f"{text} broken"

    def name_schedule(row: Entry) -> str:
        return DASH if row.bubble is None else _get_schedule(row).paper_name

    return (
        Column("Pipeline", lambda row: f"{row.backend} {row.strategy}"),
        Column("Schedule", name_schedule),
        Column("Status", attrgetter("status")),
        Column("Losses' distance", format_losses),
        Column("Final loss", attrgetter("final_loss"), known("{:.4f}")),
        Column("Staleness", _format_staleness),
        Column("Weights by stage", _format_weight_bytes),
        Column("Bubble (schedule's)", _format_bubble),
        Column("ms/iteration [95%]", attrgetter("estimate"), format_time),
        Column("Peak memory", attrgetter("peak_bytes"), megabytes),
    )


def _print_wrong_losses(study: Study) -> bool:
    """Print a sentence per pipeline with flushes whose losses are wrong; return True if there are any."""
    sentences = describe_wrong_losses(study.rows)
    for sentence in sentences:
        say(study.console, sentence, "red")
    return bool(sentences)


OUTPUT = make_comparison(lambda study: render(study.model, study.rows), _print_wrong_losses)
