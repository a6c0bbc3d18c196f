"""Megatron, plain PyTorch and DeepSpeed in one table, against forward and backward alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from parakit.config.run import Backend
from parakit.experiments.engine import has_broken_losses, make_comparison
from parakit.experiments.tables import format_bullets, format_page
from parakit.experiments.tables.zero import divide_known, format_milliseconds
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.units import change, known, megabytes, rounded, signed_percent
from parakit.reporting import Entry, compare_times, format_time

_COMPARED_PAIRS = (
    (("megatron", "dp2"), ("native", "dp2")),
    (("megatron", "dp2"), ("deepspeed", "dp2")),
    (("megatron", "zero3"), ("native", "fsdp2")),
    (("megatron", "zero3"), ("deepspeed", "zero3")),
)
"""Runs that shard alike."""


def render(model: str, rows: Sequence[Entry], left_out: Sequence[str] = ()) -> str:
    """Markdown: the table, what it says of each backend, and what was left out."""
    bare = next((row for row in rows if row.backend == Backend.BARE), None)
    table = markdown_table(Table(_make_columns(bare), tuple(rows)))
    said = format_bullets((*describe_pairs(rows), *left_out))
    return format_page("backends", model=model, table=table, verdicts=said)


def describe_pairs(rows: Sequence[Entry]) -> list[str]:
    """What may be said of each pair that shards alike: faster, slower, or within noise."""
    by_pair = {(row.backend, row.strategy): row for row in rows}
    sentences = []
    for reference, other in _COMPARED_PAIRS:
        one, two = by_pair.get(reference), by_pair.get(other)
        if one and two and one.estimate and two.estimate:
            names = " against ".join(f"{row.backend} {row.strategy}" for row in (two, one))
            over = compare_times(one.estimate, two.estimate)
            speed = f"{abs(1 - 1 / over.ratio):.1%} {'faster' if over.ratio < 1 else 'slower'}"
            end = " on this machine" if over.verdict.is_clear else f", which is {over.verdict}"
            sentences.append(f"{names}: {speed}{end}.")
    return sentences


def _make_columns(bare: Entry | None) -> tuple[Column[Entry], ...]:
    def against_bare(row: Entry) -> float | None:
        return None if bare is None or row is bare else divide_known(row.time_ms, bare.time_ms)

    return (
        Column("Backend", lambda row: row.backend),
        Column("Strategy", lambda row: row.strategy),
        Column("Status", lambda row: row.status),
        Column("Parity", lambda row: "" if row is bare else row.parity.verdict),
        Column("ms/iteration [95%]", lambda row: row.estimate, format_time),
        Column(
            "Passes alone", lambda row: row.pass_seconds_without_communication, format_milliseconds
        ),
        Column("Overhead", lambda row: row.overhead, signed_percent),
        Column("Against bare", against_bare, partial(change, decimals=1)),
        Column("Samples/s", lambda row: row.samples_per_second, rounded),
        Column("Sent/iteration", lambda row: row.sent_bytes, megabytes),
        Column("Peak memory", lambda row: row.peak_bytes, megabytes),
        Column("Loss", lambda row: None if row is bare else row.final_loss, known("{:.6f}")),
        Column("What ran", lambda row: row.implementation),
    )


OUTPUT = make_comparison(
    lambda study: render(study.model, study.rows, study.experiment.left_out), has_broken_losses
)
