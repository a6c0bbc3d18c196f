"""`python -m tools.plan validate`: every reading predicted, tables of the errors, what was refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from tools.plan.readings.residual import Residual, Residuals, residuals
from tools.plan.readings.summary import (
    Group,
    as_data,
    by_gpu,
    by_source,
    cause,
    reasons,
    worst,
)
from tools.plan.readings.table import READINGS, ReadingsError, read_readings
from tools.plan.request import RequestParser
from tools.spec.settings import add_options
from tools.text.table import Column, Table, rich_table
from tools.text.units import DASH, percent

_WORST = 15
_NAMED_LINES = 6


def main(words: list[str]) -> int:
    """Run the command; 2 and one sentence on stderr for what is no file of readings."""
    parser = RequestParser(
        prog="python -m tools.plan validate",
        description="Predict every published reading and print by how much each is missed.",
    )
    add_options(parser, "validate")
    try:
        options = parser.parse_args(words)
        found = _residuals(options.readings or READINGS)
    except (ReadingsError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(as_data(found), indent=1))
    else:
        _print(found, Console(width=None if sys.stdout.isatty() else 140))
    return 0


def _residuals(path: Path) -> Residuals:
    readings, unreadable = read_readings(path)
    return residuals(readings, unreadable)


def _print(found: Residuals, console: Console) -> None:
    console.print(rich_table(_table("By source", by_source(found))))
    console.print(rich_table(_table("By GPU", by_gpu(found))))
    console.print(rich_table(Table(_WORST_COLUMNS, tuple(worst(found, _WORST)), "Worst")))
    total = len(found.predicted) + len(found.refused)
    console.print(f"{len(found.predicted)} of {total} readings are predicted. Not predicted:")
    for source, reason, lines in reasons(found.refused):
        named = ", ".join(map(str, lines[:_NAMED_LINES]))
        more = ", …" if len(lines) > _NAMED_LINES else ""
        sentence = f"  {len(lines):3}  {source}: {reason} (row {named}{more})"
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def _table(title: str, groups: list[Group]) -> Table[Group]:
    columns = (
        Column[Group](title, lambda group: group.name, right=False),
        Column[Group]("readings", lambda group: group.readings),
        Column[Group]("predicted", lambda group: len(group.errors)),
        Column[Group]("median |error|", lambda group: group.median_abs_error, percent),
        Column[Group]("mean |error|", lambda group: group.mean_abs_error, percent),
        Column[Group]("median error", lambda group: group.median_error, _signed),
        Column[Group]("p90 |error|", lambda group: group.p90_abs_error, percent),
        Column[Group]("within 10%", lambda group: group.within(0.10), percent),
        Column[Group]("within 15%", lambda group: group.within(0.15), percent),
    )
    return Table(columns, tuple(groups))


def _signed(share: float | None) -> str:
    return DASH if share is None else f"{share:+.1%}"


_WORST_COLUMNS = (
    Column[Residual]("row", lambda item: item.reading.line),
    Column[Residual]("source", lambda item: item.reading.source, right=False, wraps=True),
    Column[Residual]("model", lambda item: item.reading.model, right=False, wraps=True),
    Column[Residual]("GPUs", lambda item: f"{item.reading.gpus} {item.reading.gpu}", right=False),
    Column[Residual]("layout", lambda item: item.expressed.spec.name, right=False),
    Column[Residual]("metric", lambda item: item.reading.metric, right=False),
    Column[Residual]("published", lambda item: f"{item.reading.value:.4g}"),
    Column[Residual]("predicted", lambda item: f"{item.predicted:.4g}"),
    Column[Residual]("error", lambda item: item.error, _signed),
    Column[Residual]("mostly", cause, right=False, wraps=True),
)
