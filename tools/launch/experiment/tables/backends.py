"""Megatron, plain PyTorch and DeepSpeed in one table, against forward and backward alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.launch.experiment.measured import Measured, time_text
from tools.launch.experiment.tables import bullets, page
from tools.launch.experiment.tables.zero import ratio
from tools.report.analyse.statistics import TimeComparison, compare
from tools.spec.run import Backend
from tools.text.table import Column, Table, markdown_table
from tools.text.units import DASH, change, megabytes, ms, rounded

_PAIRS = (
    (("megatron", "dp2"), ("native", "dp2")),
    (("megatron", "dp2"), ("deepspeed", "dp2")),
    (("megatron", "zero3"), ("native", "fsdp2")),
    (("megatron", "zero3"), ("deepspeed", "zero3")),
)
"""Runs that shard alike."""


def render(model: str, runs: Sequence[Measured], left_out: Sequence[str] = ()) -> str:
    """Markdown: the table, what it says of each backend, and what was left out."""
    bare = next((run for run in runs if run.backend == Backend.BARE), None)
    rows = tuple(_BackendRow(run, bare) for run in runs)
    table = markdown_table(Table(_COLUMNS, rows))
    said = bullets((*verdicts(runs), *left_out))
    return page("backends", model=model, table=table, verdicts=said)


def verdicts(runs: Sequence[Measured]) -> list[str]:
    """What may be said of each pair that shards alike: faster, slower, or within noise."""
    found = {(run.backend, run.strategy): run for run in runs}
    sentences = []
    for reference, other in _PAIRS:
        one, two = found.get(reference), found.get(other)
        if one and two and one.estimate and two.estimate:
            names = f"{two.backend} {two.strategy} against {one.backend} {one.strategy}"
            sentences.append(f"{names}: {_verdict(compare(one.estimate, two.estimate))}")
    return sentences


@dataclass(frozen=True)
class _BackendRow:
    run: Measured
    bare: Measured | None

    @property
    def is_bare(self) -> bool:
        return self.run is self.bare


def _verdict(result: TimeComparison) -> str:
    speed = f"{abs(1 - 1 / result.ratio):.1%} {'faster' if result.ratio < 1 else 'slower'}"
    if result.verdict.is_clear:
        return f"{speed} on this machine."
    return f"{speed}, which is {result.verdict}."


def _against_bare(row: _BackendRow) -> float | None:
    one, two = row.bare.estimate if row.bare else None, row.run.estimate
    known = one is not None and two is not None and not row.is_bare
    return ratio(two.median, one.median) if known and one and two else None


def _overhead(row: _BackendRow) -> float | None:
    return None if row.run.overhead is None else 1 + row.run.overhead


def _percent(value: float | None) -> str:
    return change(value, decimals=1)


_COLUMNS: tuple[Column[_BackendRow], ...] = (
    Column("Backend", lambda row: row.run.backend),
    Column("Strategy", lambda row: row.run.strategy),
    Column("Status", lambda row: row.run.status),
    Column("Parity", lambda row: "" if row.is_bare else row.run.parity),
    Column("ms/iteration [95%]", lambda row: row.run.estimate, time_text),
    Column(
        "Passes alone",
        lambda row: row.run.pass_seconds,
        lambda seconds: DASH if seconds is None else f"{ms(seconds)} ms",
    ),
    Column("Overhead", _overhead, _percent),
    Column("Against bare", _against_bare, _percent),
    Column("Samples/s", lambda row: row.run.samples_per_second, rounded),
    Column("Sent/iteration", lambda row: row.run.sent_bytes, megabytes),
    Column("Peak memory", lambda row: row.run.peak_bytes, megabytes),
    Column(
        "Loss",
        lambda row: None if row.is_bare else row.run.final_loss,
        lambda loss: DASH if loss is None else f"{loss:.6f}",
    ),
    Column("What ran", lambda row: row.run.implementation),
)
