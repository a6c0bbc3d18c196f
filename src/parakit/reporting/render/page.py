"""`report.html`: one file that opens offline; every text from a log is escaped by the template."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from parakit.formatting import units
from parakit.formatting.html import environment
from parakit.formatting.table import Table
from parakit.formatting.units import DASH
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.report import Report
from parakit.reporting.canvas import Chart
from parakit.reporting.explain.explanation import Explanation
from parakit.reporting.render import beside, tables
from parakit.reporting.render.headline import build_bar_groups
from parakit.reporting.render.plots import Plot, build_plots, encode_plots
from parakit.reporting.render.sentences import write_sentences

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_ARGUMENTS = 120
_INTERACTIVE = ("iteration-time", "loss", "memory")
"""Pictures that the page has as curves, or in a place of its own."""
_OPENED = ("times", "losses", "differences")
"""Curves that are not folded."""
_LONGEST = 60
"""Characters of a value; of a longer one the beginning stands, and the whole behind it."""
_WIDE = 40
"""Characters from which on a column of text may be broken."""


@dataclass(frozen=True)
class PageCell:
    """One cell: what is read, and what a sortable table sorts by."""

    text: str
    key: float | str = ""
    kind: str = ""
    """Class of the cell: `number`, `wide`, or `pill` with a verdict that has a colour."""
    reason: str = ""
    """Of a dash."""


def render_page(
    report: Report, charts: Sequence[Chart], headline: str, explanation: Explanation | None = None
) -> str:
    """The whole report as one HTML file."""
    explanation, plots = explanation or Explanation(), build_plots(report)
    memory = [chart for chart in charts if chart.name == "memory"]
    return (
        environment(_TEMPLATES)
        .get_template("page.html.j2")
        .render(
            report=report,
            answer=headline,
            bars=build_bar_groups(report),
            plots=plots,
            plot_data=encode_plots(plots),
            memory=memory,
            charts=[chart for chart in charts if not chart.name.startswith(_INTERACTIVE)],
            opened=_OPENED,
            longest=_LONGEST,
            contents=_contents(report, plots, memory, explanation),
            explanation=explanation,
            sentences=write_sentences(report),
            tables=tables,
            beside=beside,
            results=tables.page_results_table(report),
            arguments=tables.arguments_table(report, _MAX_ARGUMENTS),
            arguments_left=max(0, len(report.arguments) - _MAX_ARGUMENTS),
            provenance=list_provenance,
            cells_of=build_page_cells,
            # A heading may be broken after a slash.
            broken=lambda heading: Markup("/<wbr>").join(re.split(r"/(?=\w\w)", heading)),
            units=units,
        )
    )


def _contents(
    report: Report, plots: Sequence[Plot], memory: Sequence[Chart], explanation: Explanation
) -> dict[str, str]:
    """The sections that the page has and lists, by their ids."""
    there = {
        "results": report.entries,
        "summary": True,
        "explained": explanation.topics or explanation.tables,
        "curves": plots,
        "memory": memory,
        "measured": report.entries,
        "speed": any(entry.speed for entry in report.entries),
        "changes": report.changes,
        "published": any(entry.matches for entry in report.entries),
        "arguments": report.arguments,
        "provenance": report.entries,
    }
    names = {"summary": "In words", "measured": "How it was measured", "changes": "Changes"}
    return {id: names.get(id, id.capitalize()) for id, has in there.items() if has}


def build_page_cells[R](table: Table[R]) -> list[list[PageCell]]:
    """Cells with what a browser needs to align, colour and sort them."""
    columns = []
    for column in table.columns:
        texts = [column.cell(row) for row in table.rows]
        broad = max(map(len, texts), default=0) > _WIDE
        usual = "number" if column.right else "wide" if broad else ""
        cells = []
        for row, text in zip(table.rows, texts, strict=True):
            value, kind = column.value(row), usual
            # A value of several parts sorts by its first.
            key = value[0] if isinstance(value, tuple) else value
            if column.style and text not in ("", DASH):
                kind = f"pill {column.name.lower()} {text.split('@')[0].replace(' ', '-')}"
            why = column.why if isinstance(column.why, str) else column.why(row)
            reason = why if text == DASH else ""
            cells.append(PageCell(text, "" if key is None else key, kind, reason))
        columns.append(cells)
    return [list(line) for line in zip(*columns, strict=True)]


def list_provenance(entry: Entry) -> Mapping[str, str]:
    """Where a run was made and with what; only what is known."""
    record, run = entry.run.record, entry.run
    of, series = run.log.generation, run.samples.series
    clocks = [clock for each in series for clock in each.sm_clock_mhz if clock]
    facts: dict[str, str | None] = {
        "log": run.log.path,
        "first line": run.log.first_seen,
        "log format": f"{of.trainer} {of.name}" if of.name else None,
        "SM clock": f"{min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else None,
        "clock lowered by": ", ".join(sorted({why for each in series for why in each.throttled})),
    }
    if record is not None:
        host, data = record.host, record.dataset
        facts |= {
            "made": record.created_utc,
            "host": f"{host.name}, {host.cpu}, {host.cores} cores, {units.size(host.memory_bytes)}",
            "devices": ", ".join(host.devices),
            "driver": host.driver,
            "interconnect": host.interconnect,
            "entry": record.entry.path,
            "Megatron": run.megatron,
            "kit commit": record.kit_commit,
            "code": str(record.code) if record.code else None,
            "software": ", ".join(f"{name} {v}" for name, v in sorted(record.software.items())),
            "data": data.prefix if data else None,
            "data sha256": data.sha256 if data else None,
            "start checkpoint": record.start_checkpoint,
            "starting weights": record.start_weights,
            "seed": str(record.spec.seed),
            "environment": " ".join(f"{k}={v}" for k, v in sorted(record.environment.items())),
            "command": shlex.join(record.command),
        }
    return {name: value for name, value in facts.items() if value}
