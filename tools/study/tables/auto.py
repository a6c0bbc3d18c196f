"""The table of `make bench-auto`: predicted, measured, chosen, best, and what the choice loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

from tools.report.analyse.statistics import Estimate
from tools.report.render.tables import time_text
from tools.text.table import Column, Table, markdown_table
from tools.text.units import percent, signed_percent

TIME_LIMIT, CHOICE_LIMIT = 0.15, 0.05
"""How far a time may be off, and what the choice may lose."""


@dataclass(frozen=True)
class AutoRow:
    """One strategy, predicted and measured."""

    strategy: str
    micro_batch_size: int
    predicted_ms: float
    measured: Estimate | None
    """None where the run did not end well."""

    @property
    def error(self) -> float | None:
        """Positive where predicted too slow."""
        return self.predicted_ms / self.measured.median - 1 if self.measured else None


@dataclass(frozen=True)
class AutoGroup:
    """The strategies of one model on so many ranks."""

    model: str
    ranks: int
    rows: tuple[AutoRow, ...]
    """The planner's choice first."""

    @property
    def all_well(self) -> bool:
        """Whether every strategy was measured."""
        return all(row.measured for row in self.rows)

    @property
    def best(self) -> AutoRow | None:
        """The fastest that was measured."""
        return min(self._measured, key=_median, default=None)

    @property
    def loss(self) -> float | None:
        """Time that the choice takes beyond the best's, as a share."""
        best = self.best
        if best is None or not self.rows[0].measured:
            return None
        return _median(self.rows[0]) / _median(best) - 1

    @property
    def _measured(self) -> list[AutoRow]:
        return [row for row in self.rows if row.measured]


def render(groups: Sequence[AutoGroup]) -> str:
    """Markdown: a line for each group, one for each strategy, and the sums."""
    lines = [(group, row) for group in groups for row in group.rows]
    errors = [abs(row.error) for _, row in lines if row.error is not None]
    losses = [group.loss for group in groups if group.loss is not None]
    within = sum(error <= TIME_LIMIT for error in errors)
    right = sum(loss <= CHOICE_LIMIT for loss in losses)
    sums = (
        f"Times within {TIME_LIMIT:.0%} of the measured: {within} of {len(errors)}"
        + (f", mean |error| {mean(errors):.1%}" if errors else "")
        + f". Choice within {CHOICE_LIMIT:.0%} of the best measured: {right} of {len(losses)}"
        + (f", mean loss {mean(losses):.1%}, worst {max(losses):.1%}." if losses else ".")
    )
    return "\n\n".join(
        (
            "# The automatic choice",
            sums,
            markdown_table(Table(_GROUPS, tuple(groups))),
            "## Strategies",
            "The first of each model and number of ranks is the choice. Errors are positive where a "
            "time was predicted too slow.",
            markdown_table(Table(_ROWS, tuple(lines))),
        )
    )


def _median(row: AutoRow) -> float:
    assert row.measured is not None
    return row.measured.median


def _name(row: AutoRow | None) -> str | None:
    return f"{row.strategy}, {row.micro_batch_size}" if row else None


_GROUPS: tuple[Column[AutoGroup], ...] = (
    Column("model", lambda group: group.model, right=False),
    Column("ranks", lambda group: group.ranks),
    Column(
        "chosen, micro batch",
        lambda group: _name(group.rows[0] if group.rows else None),
        right=False,
    ),
    Column("best measured", lambda group: _name(group.best), right=False),
    Column("lost by the choice", lambda group: group.loss, percent),
)
_ROWS: tuple[Column[tuple[AutoGroup, AutoRow]], ...] = (
    Column("model", lambda line: line[0].model, right=False),
    Column("ranks", lambda line: line[0].ranks),
    Column("layout, micro batch", lambda line: _name(line[1]), right=False),
    Column("predicted, ms", lambda line: line[1].predicted_ms, lambda value: f"{value:.0f}"),
    Column("measured, ms [95%]", lambda line: line[1].measured, partial(time_text, shape=".0f")),
    Column("error", lambda line: line[1].error, partial(signed_percent, decimals=0)),
)
