"""`report.md`: the tables and verdicts as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tools.report.analyse.report_data import Entry, Report
from tools.report.canvas import Chart
from tools.report.render import wording
from tools.text import units
from tools.text.table import markdown_rows, markdown_text


def render_markdown(report: Report, charts: Sequence[Chart]) -> str:
    """The report as Markdown, charts linked from beside it."""
    parts = [f"# Report {markdown_text(report.name)}", f"Made {report.created_utc} UTC."]
    parts.append("\n".join(f"- {markdown_text(text)}" for text in wording.sentences(report)))
    if report.problems:
        parts.append("\n".join(f"- {markdown_text(text)}" for text in report.problems))
    if report.entries:
        parts += ["## Results", _results(report), "## How it was measured", _windows(report)]
        parts += ["## Beside the published figures", _published(report)]
    parts += [
        f"![{markdown_text(chart.title)}: {markdown_text(chart.text)}]({chart.name}.svg)"
        for chart in charts
    ]
    if report.corrections:
        parts += ["## What the write-ups got wrong", _corrections(report)]
    return "\n\n".join(parts) + "\n"


def _results(report: Report) -> str:
    header = ["Strategy", "Model", "Device", "Status", "ms/iteration [95%]", "Time a token"]
    header += ["Tokens/s", "MFU", "Loss", "Parity", "Parameters/rank", "Peak memory", "Notes"]
    return markdown_rows(header, [_result(entry) for entry in report.entries])


def _result(entry: Entry) -> list[str]:
    row = entry.row
    return [
        entry.label,
        row.model or units.DASH,
        row.device or units.DASH,
        row.status,
        wording.milliseconds(entry),
        wording.speed(entry),
        units.number(row.tokens_per_second),
        units.percent(row.mfu),
        units.loss(row.final_loss),
        row.parity or "",
        units.count(row.parameters_max_rank),
        units.size(row.peak_memory_bytes),
        row.notes,
    ]


def _windows(report: Report) -> str:
    rows = [
        [
            entry.label,
            str(len(entry.configuration.runs)),
            entry.run.window.text,
            entry.configuration.estimate.method if entry.configuration.estimate else units.DASH,
        ]
        for entry in report.entries
    ]
    return markdown_rows(["Strategy", "Runs", "Window of the newest run", "Interval"], rows)


def _published(report: Report) -> str:
    rows = [
        [
            entry.label,
            match.quantity,
            f"{units.number(match.measured)} {match.unit}" if match.measured else units.DASH,
            f"{', '.join(units.number(v) for v in match.published)} {match.unit}"
            f" ({match.figure.model}, source {match.figure.source.key})",
            match.verdict,
            ", ".join(match.differs),
        ]
        for entry in report.entries
        for match in entry.matches
    ]
    if not rows:
        return "Nothing was published of these configurations."
    header = ["Strategy", "Quantity", "Measured", "Published", "Verdict", "What differs"]
    return markdown_rows(header, rows)


def _corrections(report: Report) -> str:
    rows = [[c.source, c.says, c.right] for c in report.corrections]
    return markdown_rows(["Source", "It says", "Right"], rows)
