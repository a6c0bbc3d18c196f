"""The report in a terminal, also a narrow one: the columns that matter most stay."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.text import Text

from tools.report.analyse.entry import Entry
from tools.report.analyse.report import Report
from tools.report.render.sentences import sentences
from tools.report.render.tables import terminal_results
from tools.text.table import rich_table


def print_report(report: Report, console: Console) -> None:
    """Print tables, one for each model and device, and the verdicts."""
    starred = False
    for kind, members in groupby(report.entries, key=_kind):
        table = terminal_results(
            " · ".join(filter(None, kind)) or "logs", [*members], console.width
        )
        console.print(rich_table(table))
        if "published" in table.header:
            place = table.header.index("published")
            starred |= any("*" in line[place] for line in table.cells)
    if starred:
        console.print(
            "published: ms/iteration (examples/gpt3/published.yaml); * of another model.",
            style="dim",
        )
    for text in (*sentences(report), *report.problems):
        console.print(Text(f"• {text}"))


def _kind(entry: Entry) -> tuple[str, str, str]:
    run = entry.run
    return run.model, run.device, run.spec.dtype if run.spec else ""
