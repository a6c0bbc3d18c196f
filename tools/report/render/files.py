"""The report folder: every file whole or not at all, and `latest` points at the newest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from tools.records.io import write_whole
from tools.records.run import encode_run
from tools.report.analyse.entry import Entry
from tools.report.analyse.published import Match
from tools.report.analyse.report import Report
from tools.report.analyse.results import RESULTS
from tools.report.canvas import can_draw
from tools.report.explain.explanation import Explanation, explain, explanation_markdown
from tools.report.explain.timelines import timeline_charts
from tools.report.read.runs import Run
from tools.report.render.charts import draw_charts
from tools.report.render.headline import answer, sentences_under
from tools.report.render.page import render_page
from tools.report.render.text import render_markdown
from tools.report.render.thinning import evenly, extremes
from tools.text.table import Table, csv_table

MAX_SAMPLES = 2000
"""Samples a run that `results.json` keeps; longer runs are thinned evenly."""


def write_report(report: Report, folder: Path) -> str:
    """Write all files of a report; its headline.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    charts = [*draw_charts(report), *timeline_charts(report.entries)] if can_draw() else []
    explanation = explain(report)
    headline = answer(report, explanation.paid)
    contents = {
        "results.csv": csv_table(Table(RESULTS, report.entries)),
        "results.json": json_text(report, headline, explanation),
        "report.md": render_markdown(report, charts, headline) + explanation_markdown(explanation),
        "report.html": render_page(report, charts, headline, explanation),
    } | {f"{chart.name}.svg": chart.svg for chart in charts}
    for stale in folder.glob("*.svg"):
        if stale.name not in contents:
            stale.unlink()
    for name, text in contents.items():
        write_whole(folder / name, text)
    point_latest(folder)
    return headline


def json_text(report: Report, headline: str, explanation: Explanation) -> str:
    """`results.json`: every row with all that the page shows of it."""
    document = {
        "schema": 1,
        "name": report.name,
        "created_utc": report.created_utc,
        "sentences": sentences_under(headline, report),
        "problems": report.problems,
        "rows": [_entry_json(entry) for entry in report.entries],
        "predicted": [
            {"label": each.entry.label, "seconds": each.known.seconds, "error": each.error}
            | each.known.as_data()
            for each in report.planned
        ],
        "arguments": report.arguments,
        "corrections": report.corrections,
        "baseline": report.baseline,
        "changes": report.changes,
        "explanation": _explanation_json(explanation),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def _explanation_json(explanation: Explanation) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(explanation)
    for run, each in explanation.evidence.items():
        if each.configuration:
            # As RECOMPUTE= says it.
            found["evidence"][run]["configuration"]["recompute"] = str(each.configuration.recompute)
    return found


def point_latest(folder: Path) -> None:
    """Let `latest` beside the folder point at it; a real file of that name is left alone."""
    link = folder.parent / "latest"
    if folder.name == link.name or (link.exists() and not link.is_symlink()):
        return
    partial = folder.parent / ".latest.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to(folder.name)
    partial.replace(link)


def _entry_json(entry: Entry) -> dict[str, Any]:
    run, configuration = entry.run, entry.configuration
    return {column.name: column.value(entry) for column in RESULTS} | {
        "label": entry.label,
        "runs": [one.name for one in configuration.runs],
        "window": run.window.text,
        "estimate": _estimate_json(entry),
        "iteration_ms_samples": [thin(one.window.samples_ms) for one in configuration.runs],
        "sample_iterations": [thin(one.window.iterations) for one in configuration.runs],
        "loss_curve": _loss_curve(run),
        "rates": entry.rates,
        "changes_within": entry.shifts,
        "parity_detail": entry.parity,
        "speed": entry.speed,
        "published_time_a_sample_over_baseline": entry.published_ratio,
        "published": [_match_json(match) for match in entry.matches],
        "memory": run.log.memory,
        "ledgers": run.ledgers,
        "device_samples": run.samples.series,
        "timers": run.log.timers,
        "validation": run.log.validation,
        "parameters_by_rank": run.log.parameters,
        "provenance": encode_run(run.record) if run.record else None,
        "arguments": run.arguments if run.record is None else None,
    }


def _match_json(match: Match) -> dict[str, Any]:
    # Of the figure what names it and is compared, not the rest of its write-up's table.
    fields = asdict(match)
    return fields | {"figure": {name: fields["figure"][name] for name in _OF_FIGURE}}


_OF_FIGURE = (
    "source",
    "backend",
    "model",
    "strategy",
    "devices",
    "micro_batch_size",
    "global_batch_size",
    "dtype",
    "iteration_ms",
    "device_memory_mib",
    "caution",
)


def thin(values: Sequence[Any]) -> list[Any]:
    """At most `MAX_SAMPLES` values, evenly spread."""
    return [values[place] for place in evenly(len(values), MAX_SAMPLES)]


def _loss_curve(run: Run) -> list[list[float]]:
    """Iteration and loss of at most `MAX_SAMPLES` lines, the extremes among them."""
    table = run.log.iterations
    known = table.known("lm_loss")
    numbers, losses = table.numbers[known], table.values("lm_loss")[known]
    kept = extremes(losses, MAX_SAMPLES)
    return [[*point] for point in zip(numbers[kept].tolist(), losses[kept].tolist(), strict=True)]


def _estimate_json(entry: Entry) -> dict[str, Any] | None:
    found = entry.configuration.estimate
    if found is None:
        return None
    fields = {name: getattr(found, name) for name in ("median", "low", "high", "count", "runs")}
    return fields | {"spread": found.spread, "method": found.method.value}
