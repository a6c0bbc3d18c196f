"""The report as text: Markdown for `report.md`, tables that fit its width for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from tools.report.analyse.entry import Entry
from tools.report.analyse.report import Report
from tools.report.canvas import Chart
from tools.report.render import beside, tables
from tools.report.render.headline import sentences_under
from tools.report.render.tables import terminal_results
from tools.text.table import markdown_table, markdown_text, rich_table

_NOTHING_PUBLISHED = "Nothing was published of these configurations."


def print_report(report: Report, headline: str, console: Console) -> None:
    """Print tables, one for each model and device, the headline and the verdicts."""
    for kind, members in groupby(report.entries, key=_kind):
        table = terminal_results(
            " · ".join(filter(None, kind)) or "logs", [*members], console.width
        )
        console.print(rich_table(table))
    for text in (*sentences_under(headline, report), *report.problems):
        console.print(Text(f"• {text}"))


def render_markdown(report: Report, charts: Sequence[Chart], headline: str) -> str:
    """The report as Markdown, charts linked from beside it."""
    parts = [f"# Report {markdown_text(report.name)}", f"Made {report.created_utc} UTC."]
    said = sentences_under(headline, report)
    parts += [_listed(texts) for texts in (said, report.problems) if texts]
    if report.entries:
        matches = beside.markdown_matches(report)
        published = markdown_table(matches) if matches.rows else _NOTHING_PUBLISHED
        parts += ["## Results", markdown_table(tables.markdown_results(report))]
        parts += ["## How it was measured", markdown_table(tables.windows(report))]
        parts += ["## Beside the published figures", published]
    if report.planned:
        parts += ["## Beside the planner's times", markdown_table(beside.planned(report))]
    for chart in charts:
        title, text = markdown_text(chart.title), markdown_text(chart.text)
        parts.append(f"![{title}: {text}]({chart.name}.svg)")
    if report.corrections:
        wrong = markdown_table(beside.corrections(report))
        parts += ["## What the write-ups got wrong", wrong]
    return "\n\n".join(parts) + "\n"


def _kind(entry: Entry) -> tuple[str, str, str]:
    run = entry.run
    return run.model, run.device, run.spec.dtype if run.spec else ""


def _listed(texts: Sequence[str]) -> str:
    return "\n".join(f"- {markdown_text(text)}" for text in texts)
