"""Write a report's folder and print it in a terminal.

The folder holds `report.html`, `report.md`, `results.csv`, `results.json` and the charts as SVG. Each file
is written atomically. The link `latest` beside the folder points at the newest report.
"""

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
from parakit.logs import Run
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.published import Match
from parakit.reporting.analyse.report import Report
from parakit.reporting.analyse.results import RESULTS
from parakit.reporting.canvas import Chart, can_draw, evenly_spread_indexes, extreme_indexes
from parakit.reporting.explain.explanation import Explanation, explain, explanation_markdown
from parakit.reporting.explain.timelines import draw_timelines
from parakit.reporting.render import beside, tables
from parakit.reporting.render.charts import draw_charts
from parakit.reporting.render.headline import headline_and_sentences, write_headline
from parakit.reporting.render.page import render_page
from parakit.reporting.render.sentences import write_sentences
from parakit.reporting.render.summary import summary_sentences, terminal_sentences

MAX_SAMPLES = 2000
"""Largest number of samples per run in `results.json`; longer runs are thinned evenly."""


@dataclass(frozen=True, repr=False)
class FinishedReport(PresentedTable):
    """Report with its headline and its explanation, before any file is written."""

    report: Report

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Rows of the report; a row pools the runs of one configuration."""
        return self.report.entries

    @cached_property
    def explanation(self) -> Explanation:
        """Answers to what each run pays for; empty if no run left a measurement."""
        return explain(self.report)

    @cached_property
    def headline(self) -> str:
        """Main result: which row is fastest, and what the other rows pay for."""
        return write_headline(self.report, self.explanation.paid)

    def show(self, console: Console) -> None:
        """Print the tables and a summary of a few sentences, as `parakit report` does."""
        print_report(self.report, write_headline(self.report), console)

    def to_dict(self) -> dict[str, Any]:
        """Return what `results.json` of the report's folder holds."""
        data: dict[str, Any] = msgspec.json.decode(self.json_text)
        return data

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return a row per entry, with the columns of `results.csv`."""
        return [{column.name: column.value(entry) for column in RESULTS} for entry in self.entries]

    def write(self, folder: str | Path) -> None:
        """Write the report's folder: `report.html`, `report.md`, `results.csv`, `results.json` and charts.

        The link `latest` next to the folder then points to the folder.

        Raises:
            OSError: The folder cannot be written.
        """
        write_report(self, Path(folder))

    @cached_property
    def json_text(self) -> str:
        """Text of `results.json`: every row with all figures that the page shows."""
        return _json_text(self.report, self.headline, self.explanation)


def write_report(finished: FinishedReport, folder: Path) -> None:
    """Write all files of a report, delete SVG files of an earlier report, and point `latest` at the folder.

    If `latest` is a file or a folder and not a link, it is not touched.

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
    link, partial = folder.parent / "latest", folder.parent / ".latest.partial"
    if folder.name != link.name and (link.is_symlink() or not link.exists()):
        partial.unlink(missing_ok=True)
        partial.symlink_to(folder.name)
        partial.replace(link)


def _json_text(report: Report, headline: str, explanation: Explanation) -> str:
    """Return the text of `results.json`."""
    explanation_data: dict[str, Any] = msgspec.to_builtins(explanation)
    for run, evidence in explanation.evidence.items():
        if evidence.configuration:
            # The file has the recomputation as RECOMPUTE= states it, and not as the fields of a class.
            recompute = str(evidence.configuration.recompute)
            explanation_data["evidence"][run]["configuration"]["recompute"] = recompute
    document = {
        "schema": 1,
        "name": report.name,
        "created_utc": report.created_utc,
        "sentences": headline_and_sentences(headline, report),
        "problems": report.problems,
        "rows": [_entry_data(entry) for entry in report.entries],
        "predicted": [
            {"label": row.entry.label, "seconds": row.known.seconds, "error": row.error}
            | row.known.to_dict()
            for row in report.planned
        ],
        "arguments": report.arguments,
        "corrections": report.corrections,
        "baseline": report.baseline,
        "changes": report.changes,
        "explanation": explanation_data,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def _entry_data(entry: Entry) -> dict[str, Any]:
    """Return a row's entry in `results.json`: the columns of `results.csv` and further details."""
    run, configuration = entry.run, entry.configuration
    estimate = configuration.estimate
    estimate_data = estimate and {name: getattr(estimate, name) for name in _ESTIMATE_FIELDS}
    return {column.name: column.value(entry) for column in RESULTS} | {
        "label": entry.label,
        "runs": [pooled_run.name for pooled_run in configuration.runs],
        "window": run.window.text,
        "estimate": estimate_data,
        "iteration_ms_samples": [
            _thin(pooled_run.window.samples_ms) for pooled_run in configuration.runs
        ],
        "sample_iterations": [
            _thin(pooled_run.window.iterations) for pooled_run in configuration.runs
        ],
        "loss_curve": _thinned_losses(run),
        "rates": entry.rates,
        "changes_within": entry.changes_within_run,
        "parity_detail": entry.parity,
        "speed": entry.speed,
        "published_time_a_sample_over_baseline": entry.published_ratio,
        "published": [_match_data(match) for match in entry.matches],
        "memory": run.log.memory,
        "ledgers": run.measurements,
        "device_samples": run.samples.series,
        "timers": run.log.timers,
        "validation": run.log.validation,
        "parameters_by_rank": run.log.parameters,
        "provenance": encode_run(run.record) if run.record else None,
        "arguments": run.arguments if run.record is None else None,
    }


_ESTIMATE_FIELDS = ("median", "low", "high", "count", "runs", "spread", "method")
_FIGURE_FIELDS = (
    *("source", "backend", "model", "strategy", "devices", "micro_batch_size"),
    *("global_batch_size", "dtype", "iteration_ms", "device_memory_mib", "caution"),
)
"""Fields of a published figure that `results.json` holds; the write-up's other figures are left out."""


def _match_data(match: Match) -> dict[str, Any]:
    """Return what `results.json` holds of a published quantity."""
    data = asdict(match)
    return data | {"figure": {name: data["figure"][name] for name in _FIGURE_FIELDS}}


def _thinned_losses(run: Run) -> list[list[float]]:
    """Return pairs of iteration and loss for at most MAX_SAMPLES lines, among them the extreme losses."""
    lines = run.log.iterations
    known = lines.known("lm_loss")
    numbers, losses = lines.numbers[known], lines.values("lm_loss")[known]
    indexes = extreme_indexes(losses, MAX_SAMPLES)
    points = zip(numbers[indexes].tolist(), losses[indexes].tolist(), strict=True)
    return [[iteration, loss] for iteration, loss in points]


def _thin(values: Sequence[Any]) -> list[Any]:
    """Return MAX_SAMPLES values at most, spread evenly."""
    return [values[index] for index in evenly_spread_indexes(len(values), MAX_SAMPLES)]


def print_report(report: Report, headline: str, console: Console) -> None:
    """Print a table per model, device and precision, a summary of a few sentences, and the report's problems.

    Entries share a table only if they follow one another in the report.
    """

    def group_key(entry: Entry) -> tuple[str, str, str]:
        return entry.run.model, entry.run.device, entry.spec.dtype if entry.spec else ""

    for key, members in groupby(report.entries, key=group_key):
        title = " · ".join(filter(None, key)) or "logs"
        table = tables.terminal_results_table(title, [*members], console.width)
        console.print(rich_table(table))
    for text in (*terminal_sentences(report, headline), *report.problems):
        console.print(Text(f"• {text}"))


def render_markdown(report: Report, charts: Sequence[Chart], headline: str) -> str:
    """Return the report as Markdown; charts are linked as SVG files in the same folder."""
    parts = [f"# Report {markdown_text(report.name)}", f"Made {report.created_utc} UTC."]
    summary = list(dict.fromkeys((headline, *summary_sentences(report))))
    parts += [_bullet_list(texts) for texts in (summary, report.problems) if texts]
    if report.entries:
        matches = beside.markdown_matches_table(report)
        nothing = "Nothing was published of these configurations."
        parts += ["## Results", markdown_table(tables.markdown_results_table(report))]
        parts += ["## All verdicts", _bullet_list(write_sentences(report))]
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


def _bullet_list(texts: Sequence[str]) -> str:
    """Return texts as a Markdown list."""
    return "\n".join(f"- {markdown_text(text)}" for text in texts)
