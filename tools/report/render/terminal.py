"""The report in a terminal, also a narrow one: the columns that matter most stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.report.analyse.report_data import Entry, Report
from tools.report.render import wording
from tools.text import units

_STYLES = {"ok": "green", "held": "green", "reference": "cyan", "": "dim"}


@dataclass(frozen=True)
class _Column:
    name: str
    text: Callable[[Entry], str]
    right: bool = True


def _interval(entry: Entry) -> str:
    low, high = entry.row.iteration_ms_ci_low, entry.row.iteration_ms_ci_high
    return f"{units.number(low)}–{units.number(high)}" if low and high else units.DASH


# Most important first: what does not fit the width is left out from the end.
_COLUMNS = (
    _Column("strategy", lambda e: e.label, right=False),
    _Column("ms/iteration", lambda e: units.number(e.row.iteration_ms_median)),
    _Column("parity", lambda e: e.row.parity or "", right=False),
    _Column("loss", lambda e: units.loss(e.row.final_loss)),
    _Column("tokens/s", lambda e: units.number(e.row.tokens_per_second)),
    _Column("status", lambda e: e.row.status, right=False),
    _Column("published", wording.published),
    _Column("95%", _interval),
    _Column("time a token", wording.speed, right=False),
    _Column("params/rank", lambda e: units.count(e.row.parameters_max_rank)),
    _Column("peak memory", lambda e: units.size(e.row.peak_memory_bytes)),
    _Column("sent/iter.", lambda e: units.size(e.row.comm_bytes_per_iteration)),
    _Column("MFU", lambda e: units.percent(e.row.mfu)),
)
_ORDER = (
    *("strategy", "status", "ms/iteration", "95%", "time a token", "tokens/s", "MFU", "loss"),
    *("parity", "params/rank", "peak memory", "sent/iter.", "published"),
)


def print_report(report: Report, console: Console) -> None:
    """Print tables, one for each model and device, and the verdicts."""
    starred = False
    for (model, device, dtype), members in groupby(
        report.entries, key=lambda e: (e.row.model, e.row.device, e.row.dtype)
    ):
        entries = list(members)
        columns = _fitting(entries, console.width)
        title = " · ".join(filter(None, (model, device, dtype))) or "logs"
        console.print(_table(title, entries, columns))
        shown = any(column.name == "published" for column in columns)
        starred |= shown and any("*" in wording.published(entry) for entry in entries)
    if starred:
        console.print(
            "published: ms/iteration (examples/gpt3/published.yaml); * of another model.",
            style="dim",
        )
    for text in (*wording.sentences(report), *report.problems):
        console.print(Text(f"• {text}"))


def _table(title: str, entries: list[Entry], columns: list[_Column]) -> Table:
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True)
    for entry in entries:
        table.add_row(*(_cell(column.name, column.text(entry)) for column in columns))
    return table


def _fitting(entries: list[Entry], width: int) -> list[_Column]:
    room = width
    chosen = []
    for column in _COLUMNS:
        texts = [column.text(entry) for entry in entries]
        if all(text in ("", units.DASH) for text in texts):
            continue  # A column of dashes tells nothing.
        needed = max(len(column.name), *(len(text) for text in texts)) + 2
        if needed <= room:
            room -= needed
            chosen.append(column)
    return sorted(chosen, key=lambda column: _ORDER.index(column.name))


def _cell(name: str, text: str) -> Text:
    if name == "status":
        return Text(text, style=_STYLES.get(text, "bold red"))
    if name == "parity":
        style = "bold red" if text.startswith("broken") else _STYLES.get(text, "yellow")
        return Text(text, style=style)
    return Text(text)
