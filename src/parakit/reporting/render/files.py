"""The report folder, every file whole or not at all, and `latest` points at the newest; and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from parakit.artifacts.io import write_atomically
from parakit.artifacts.run import encode_run
from parakit.formatting.presented import PresentedTable
from parakit.formatting.table import Table, csv_table, markdown_table, markdown_text, rich_table
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.report import Report
from parakit.reporting.analyse.results import RESULTS
from parakit.reporting.canvas import Chart, can_draw, evenly_spread_indexes, extreme_indexes
from parakit.reporting.explain.explanation import Explanation, explain, explanation_markdown
from parakit.reporting.explain.timelines import draw_timelines
from parakit.reporting.render import beside, tables
from parakit.reporting.render.charts import draw_charts
from parakit.reporting.render.headline import headline_and_sentences, write_headline
from parakit.reporting.render.page import render_page

MAX_SAMPLES = 2000
"""Samples a run that `results.json` keeps; longer runs are thinned evenly."""


@dataclass(frozen=True, repr=False)
class FinishedReport(PresentedTable):
    """A report with its headline and its explanation, before any file of it is written."""

    report: Report

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Rows of the report: runs of one configuration, pooled."""
        return self.report.entries

    @cached_property
    def explanation(self) -> Explanation:
        """Sentences on what each run pays for; empty without a communication log."""
        return explain(self.report)

    @cached_property
    def headline(self) -> str:
        """The report in a few words."""
        return write_headline(self.report, self.explanation.paid)

    def show(self, console: Console) -> None:
        """Print the tables, the headline and the verdicts, as `parakit report` does."""
        print_report(self.report, self.headline, console)

    def to_dict(self) -> dict[str, Any]:
        """Return what `results.json` of the report's folder holds."""
        data: dict[str, Any] = msgspec.json.decode(self.json_text)
        return data

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return a row per entry, with the columns of `results.csv`."""
        return [{column.name: column.value(entry) for column in RESULTS} for entry in self.entries]

    def write(self, folder: str | Path) -> None:
        """Write the report's folder: `report.html`, `report.md`, `results.csv`, `results.json`, charts.

        The link `latest` beside the folder then points at it.

        Raises:
            OSError: The folder cannot be written.
        """
        write_report(self, Path(folder))

    @cached_property
    def json_text(self) -> str:
        """Text of `results.json`: every row with all that the page shows of it."""
        return _json_text(self.report, self.headline, self.explanation)


def write_report(finished: FinishedReport, folder: Path) -> None:
    """Write all files of a report.

    Raises:
        OSError: The folder cannot be written.
    """
    report, headline, explanation = finished.report, finished.headline, finished.explanation
    folder.mkdir(parents=True, exist_ok=True)
    charts = [*draw_charts(report), *draw_timelines(report.entries)] if can_draw() else []
    contents = {
        "results.csv": csv_table(Table(RESULTS, report.entries)),
        "results.json": finished.json_text,
        "report.md": render_markdown(report, charts, headline) + explanation_markdown(explanation),
        "report.html": render_page(report, charts, headline, explanation),
    } | {f"{chart.name}.svg": chart.svg for chart in charts}
    for stale in folder.glob("*.svg"):
        if stale.name not in contents:
            stale.unlink()
    for name, text in contents.items():
        write_atomically(folder / name, text)
    # `latest` beside the folder points at it; a real file of that name is left alone.
    link, partial = folder.parent / "latest", folder.parent / ".latest.partial"
    if folder.name != link.name and (link.is_symlink() or not link.exists()):
        partial.unlink(missing_ok=True)
        partial.symlink_to(folder.name)
        partial.replace(link)


def _json_text(report: Report, headline: str, explanation: Explanation) -> str:
    explained: dict[str, Any] = msgspec.to_builtins(explanation)
    for run, each in explanation.evidence.items():
        if each.configuration:
            # As RECOMPUTE= says it.
            recompute = str(each.configuration.recompute)
            explained["evidence"][run]["configuration"]["recompute"] = recompute
    document = {
        "schema": 1,
        "name": report.name,
        "created_utc": report.created_utc,
        "sentences": headline_and_sentences(headline, report),
        "problems": report.problems,
        "rows": [_entry_json(entry) for entry in report.entries],
        "predicted": [
            {"label": each.entry.label, "seconds": each.known.seconds, "error": each.error}
            | each.known.to_dict()
            for each in report.planned
        ],
        "arguments": report.arguments,
        "corrections": report.corrections,
        "baseline": report.baseline,
        "changes": report.changes,
        "explanation": explained,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def _entry_json(entry: Entry) -> dict[str, Any]:
    run, configuration = entry.run, entry.configuration
    # Iteration and loss of so many lines at most, the extremes among them.
    lines = run.log.iterations
    known = lines.known("lm_loss")
    numbers, losses = lines.numbers[known], lines.values("lm_loss")[known]
    kept = extreme_indexes(losses, MAX_SAMPLES)
    curve = [[*point] for point in zip(numbers[kept].tolist(), losses[kept].tolist(), strict=True)]
    found = configuration.estimate
    # Of a figure what names it and is compared, not the rest of its write-up's table.
    matches = [asdict(match) for match in entry.matches]
    published = [m | {"figure": {name: m["figure"][name] for name in _OF_FIGURE}} for m in matches]
    return {column.name: column.value(entry) for column in RESULTS} | {
        "label": entry.label,
        "runs": [one.name for one in configuration.runs],
        "window": run.window.text,
        "estimate": {name: getattr(found, name) for name in _OF_ESTIMATE} if found else None,
        "iteration_ms_samples": [_thin(one.window.samples_ms) for one in configuration.runs],
        "sample_iterations": [_thin(one.window.iterations) for one in configuration.runs],
        "loss_curve": curve,
        "rates": entry.rates,
        "changes_within": entry.changes_within_run,
        "parity_detail": entry.parity,
        "speed": entry.speed,
        "published_time_a_sample_over_baseline": entry.published_ratio,
        "published": published,
        "memory": run.log.memory,
        "ledgers": run.measurements,
        "device_samples": run.samples.series,
        "timers": run.log.timers,
        "validation": run.log.validation,
        "parameters_by_rank": run.log.parameters,
        "provenance": encode_run(run.record) if run.record else None,
        "arguments": run.arguments if run.record is None else None,
    }


_OF_ESTIMATE = ("median", "low", "high", "count", "runs", "spread", "method")
_OF_FIGURE = (
    *("source", "backend", "model", "strategy", "devices", "micro_batch_size"),
    *("global_batch_size", "dtype", "iteration_ms", "device_memory_mib", "caution"),
)


def _thin(values: Sequence[Any]) -> list[Any]:
    return [values[place] for place in evenly_spread_indexes(len(values), MAX_SAMPLES)]


def print_report(report: Report, headline: str, console: Console) -> None:
    """Print tables, one for each model and device, the headline and the verdicts."""

    def kind(entry: Entry) -> tuple[str, str, str]:
        return entry.run.model, entry.run.device, entry.spec.dtype if entry.spec else ""

    for each, members in groupby(report.entries, key=kind):
        title = " · ".join(filter(None, each)) or "logs"
        console.print(rich_table(tables.terminal_results_table(title, [*members], console.width)))
    for text in (*headline_and_sentences(headline, report), *report.problems):
        console.print(Text(f"• {text}"))


def render_markdown(report: Report, charts: Sequence[Chart], headline: str) -> str:
    """The report as Markdown, charts linked from beside it."""
    parts = [f"# Report {markdown_text(report.name)}", f"Made {report.created_utc} UTC."]
    for texts in (headline_and_sentences(headline, report), report.problems):
        if texts:
            parts.append("\n".join(f"- {markdown_text(text)}" for text in texts))
    if report.entries:
        matches = beside.markdown_matches_table(report)
        nothing = "Nothing was published of these configurations."
        parts += ["## Results", markdown_table(tables.markdown_results_table(report))]
        parts += ["## How it was measured", markdown_table(tables.windows_table(report))]
        parts += ["## Beside the published figures"]
        parts += [markdown_table(matches) if matches.rows else nothing]
    if report.planned:
        parts += ["## Beside the planner's times", markdown_table(beside.planned_table(report))]
    for chart in charts:
        title, text = markdown_text(chart.title), markdown_text(chart.text)
        parts.append(f"![{title}: {text}]({chart.name}.svg)")
    if report.corrections:
        wrong = markdown_table(beside.corrections_table(report))
        parts += ["## What the write-ups got wrong", wrong]
    return "\n\n".join(parts) + "\n"
