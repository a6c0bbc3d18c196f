"""Compare Megatron, plain PyTorch and DeepSpeed, also with forward and backward passes alone (`bare`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

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
"""Pairs of backend and strategy that shard in the same way: the reference, and what is compared with it."""


def render(model: str, rows: Sequence[Entry], left_out: Sequence[str] = ()) -> str:
    """Return the page in Markdown: the table, a sentence per pair, and the cells that were left out."""
    bare = next((row for row in rows if row.backend == Backend.BARE), None)
    table = markdown_table(Table(_make_columns(bare), tuple(rows)))
    sentences = format_bullets((*describe_pairs(rows), *left_out))
    return format_page("backends", model=model, table=table, verdicts=sentences)


def describe_pairs(rows: Sequence[Entry]) -> list[str]:
    """Return a sentence per pair of `_COMPARED_PAIRS`: faster or slower, and whether that is within noise.

    Pairs without times give no sentence.
    """
    rows_by_run = {(row.backend, row.strategy): row for row in rows}
    sentences = []
    for reference_run, other_run in _COMPARED_PAIRS:
        reference, other = rows_by_run.get(reference_run), rows_by_run.get(other_run)
        if reference is None or other is None:
            continue
        if reference.estimate is None or other.estimate is None:
            continue
        times = compare_times(reference.estimate, other.estimate)
        direction = "faster" if times.ratio < 1 else "slower"
        percentage = f"{abs(1 - 1 / times.ratio):.1%}"
        end = " on this machine" if times.verdict.is_clear else f", which is {times.verdict}"
        sentences.append(
            f"{other.backend} {other.strategy} against {reference.backend} {reference.strategy}: "
            f"{percentage} {direction}{end}."
        )
    return sentences


def _make_columns(bare: Entry | None) -> tuple[Column[Entry], ...]:
    """Return the table's columns; `bare` is the row of forward and backward alone, or None."""

    def get_parity(row: Entry) -> str:
        return "" if row is bare else row.parity.verdict

    def get_loss(row: Entry) -> float | None:
        return None if row is bare else row.final_loss

    def divide_by_bare(row: Entry) -> float | None:
        if bare is None or row is bare:
            return None
        return divide_known(row.time_ms, bare.time_ms)

    return (
        Column("Backend", attrgetter("backend")),
        Column("Strategy", attrgetter("strategy")),
        Column("Status", attrgetter("status")),
        Column("Parity", get_parity),
        Column("ms/iteration [95%]", attrgetter("estimate"), format_time),
        Column(
            "Passes alone", attrgetter("pass_seconds_without_communication"), format_milliseconds
        ),
        Column("Overhead", attrgetter("overhead"), signed_percent),
        Column("Against bare", divide_by_bare, partial(change, decimals=1)),
        Column("Samples/s", attrgetter("samples_per_second"), rounded),
        Column("Sent/iteration", attrgetter("sent_bytes"), megabytes),
        Column("Peak memory", attrgetter("peak_bytes"), megabytes),
        Column("Loss", get_loss, known("{:.6f}")),
        Column("What ran", attrgetter("implementation")),
    )


OUTPUT = make_comparison(
    lambda study: render(study.model, study.rows, study.experiment.left_out), has_broken_losses
)
