"""`report.md`: the tables and verdicts as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tools.report import wording
from tools.report.chart_canvas import Chart
from tools.report.report_data import Entry, Report


def render_markdown(report: Report, charts: Sequence[Chart]) -> str:
    """The report as Markdown, charts linked from beside it."""
    parts = [f"# Report {plain(report.name)}", f"Made {report.created_utc} UTC."]
    parts.append("\n".join(f"- {plain(text)}" for text in wording.sentences(report)))
    if report.problems:
        parts.append("\n".join(f"- {plain(text)}" for text in report.problems))
    if report.entries:
        parts += ["## Results", _results(report), "## How it was measured", _windows(report)]
        parts += ["## Beside the published figures", _published(report)]
    parts += [f"![{plain(chart.title)}: {plain(chart.text)}]({chart.name}.svg)" for chart in charts]
    if report.corrections:
        parts += ["## What the write-ups got wrong", _corrections(report)]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(plain(cell) for cell in line) + " |" for line in lines)


def _results(report: Report) -> str:
    header = ["Strategy", "Model", "Device", "Status", "ms/iteration [95%]", "Time a token"]
    header += ["Tokens/s", "MFU", "Loss", "Parity", "Parameters/rank", "Peak memory", "Notes"]
    return table(header, [_result(entry) for entry in report.entries])


def _result(entry: Entry) -> list[str]:
    row = entry.row
    return [
        entry.label,
        row.model or wording.DASH,
        row.device or wording.DASH,
        row.status,
        wording.milliseconds(entry),
        wording.speed(entry),
        wording.number(row.tokens_per_second),
        wording.percent(row.mfu),
        wording.loss(row.final_loss),
        row.parity or "",
        wording.count(row.parameters_max_rank),
        wording.size(row.peak_memory_bytes),
        row.notes,
    ]


def _windows(report: Report) -> str:
    rows = [
        [
            entry.label,
            str(len(entry.configuration.runs)),
            entry.run.window.text,
            entry.configuration.estimate.method if entry.configuration.estimate else wording.DASH,
        ]
        for entry in report.entries
    ]
    return table(["Strategy", "Runs", "Window of the newest run", "Interval"], rows)


def _published(report: Report) -> str:
    rows = [
        [
            entry.label,
            match.quantity,
            f"{wording.number(match.measured)} {match.unit}" if match.measured else wording.DASH,
            f"{', '.join(wording.number(v) for v in match.published)} {match.unit}"
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
    return table(header, rows)


def _corrections(report: Report) -> str:
    rows = [[c.source, c.says, c.right] for c in report.corrections]
    return table(["Source", "It says", "Right"], rows)


def plain(text: str) -> str:
    """Text that stays in its cell and starts no markup."""
    flat = " ".join(str(text).split())
    for sign in "\\`*_|<>[]":
        flat = flat.replace(
            sign, "\\" + sign if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign]
        )
    return flat
