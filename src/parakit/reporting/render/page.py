"""Render `report.html`: one file that works offline; the template escapes every text from a log."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from parakit.artifacts.run import RunRecord
from parakit.formatting import units
from parakit.formatting.html import environment
from parakit.formatting.table import Column, Table
from parakit.formatting.units import DASH
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.report import Report
from parakit.reporting.canvas import Chart
from parakit.reporting.explain.explanation import Explanation
from parakit.reporting.render import beside, tables
from parakit.reporting.render.headline import build_bar_groups
from parakit.reporting.render.plots import Plot, build_plots, encode_plots
from parakit.reporting.render.sentences import write_sentences
from parakit.reporting.render.summary import summary_sentences

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_ARGUMENTS = 120
_OTHER_SECTIONS = ("iteration-time", "loss", "memory")
"""Beginnings of the names of charts that the page shows as curves or in a section of their own."""
_OPEN_PLOTS = ("times", "losses", "differences")
"""Names of the curves that are not folded."""
_MAX_SHOWN_CHARACTERS = 60
"""Characters of a value that are shown; the rest of a longer value is folded."""
_MIN_WIDE_CHARACTERS = 40
"""Characters from which on the text of a column may be broken into lines."""


@dataclass(frozen=True)
class PageCell:
    """Cell of a table on the page."""

    text: str
    key: float | str = ""
    """Value by which a sortable table sorts."""
    kind: str = ""
    """CSS classes of the cell: `number`, `wide`, or `pill` with a verdict that has a colour."""
    reason: str = ""
    """Tooltip of a dash: why the value is unknown."""


def render_page(
    report: Report, charts: Sequence[Chart], headline: str, explanation: Explanation | None = None
) -> str:
    """Return the whole report as one HTML file."""
    explanation, plots = explanation or Explanation(), build_plots(report)
    memory = [chart for chart in charts if chart.name == "memory"]
    other_charts = [chart for chart in charts if not chart.name.startswith(_OTHER_SECTIONS)]
    template = environment(_TEMPLATES).get_template("page.html.j2")
    return template.render(
        report=report,
        answer=headline,
        bars=build_bar_groups(report),
        plots=plots,
        plot_data=encode_plots(plots),
        memory=memory,
        charts=other_charts,
        opened=_OPEN_PLOTS,
        longest=_MAX_SHOWN_CHARACTERS,
        contents=_list_contents(report, plots, memory, explanation),
        explanation=explanation,
        summary=[text for text in summary_sentences(report) if text not in headline],
        sentences=write_sentences(report),
        tables=tables,
        beside=beside,
        results=tables.page_results_table(report),
        arguments=tables.arguments_table(report, _MAX_ARGUMENTS),
        arguments_left=max(0, len(report.arguments) - _MAX_ARGUMENTS),
        provenance=list_provenance,
        cells_of=build_page_cells,
        broken=_allow_breaks_after_slashes,
        units=units,
    )


def _allow_breaks_after_slashes(heading: str) -> Markup:
    """Return a column's heading in which a line may be broken after a slash."""
    return Markup("/<wbr>").join(re.split(r"/(?=\w\w)", heading))


def _list_contents(
    report: Report, plots: Sequence[Plot], memory: Sequence[Chart], explanation: Explanation
) -> dict[str, str]:
    """Return the titles of the page's sections, by section id."""
    sections = {
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
    titles = {"summary": "In words", "measured": "How it was measured", "changes": "Changes"}
    return {
        section: titles.get(section, section.capitalize())
        for section, has_content in sections.items()
        if has_content
    }


def build_page_cells[R](table: Table[R]) -> list[list[PageCell]]:
    """Return the cells of a table by line, with their sort keys, CSS classes and tooltips."""
    columns = [_build_column(table, column) for column in table.columns]
    return [list(line) for line in zip(*columns, strict=True)]


def _build_column[R](table: Table[R], column: Column[R]) -> list[PageCell]:
    """Return the cells of one column, in the order of the table's rows."""
    texts = [column.cell(row) for row in table.rows]
    longest = max((len(text) for text in texts), default=0)
    usual_kind = "wide" if longest > _MIN_WIDE_CHARACTERS else ""
    if column.right:
        usual_kind = "number"
    cells = []
    for row, text in zip(table.rows, texts, strict=True):
        kind = usual_kind
        if column.style and text not in ("", DASH):
            verdict = text.split("@")[0].replace(" ", "-")
            kind = f"pill {column.name.lower()} {verdict}"
        why_empty = ""
        if text == DASH:
            why_empty = column.why if isinstance(column.why, str) else column.why(row)
        cells.append(PageCell(text, _sort_key(column.value(row)), kind, why_empty))
    return cells


def _sort_key(value: Any) -> Any:
    """Return the value by which the page sorts a cell. A value of several parts sorts by its first part."""
    key = value[0] if isinstance(value, tuple) else value
    return "" if key is None else key


def list_provenance(entry: Entry) -> Mapping[str, str]:
    """Return facts on where, when and with which software a run was made, by label. Unknown facts are left out."""
    run = entry.run
    clocks: list[float] = []
    throttle_reasons: set[str] = set()
    for series in run.samples.series:
        clocks += [clock for clock in series.sm_clock_mhz if clock]
        throttle_reasons.update(series.throttled)
    trainer = run.log.generation
    facts: dict[str, str | None] = {
        "log": run.log.path,
        "first line": run.log.first_seen,
        "log format": f"{trainer.trainer} {trainer.name}" if trainer.name else None,
        "SM clock": f"{min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else None,
        "clock lowered by": ", ".join(sorted(throttle_reasons)),
    }
    if run.record is not None:
        facts |= _recorded_facts(run.record, run.megatron)
    return {name: value for name, value in facts.items() if value}


def _recorded_facts(record: RunRecord, megatron: str) -> dict[str, str | None]:
    """Return the facts in a run's `run.json` on host, code, data and command: texts by label, for the page.

    None means that the record does not state the fact. `megatron` is the text of the Megatron version.
    """
    host, data = record.host, record.dataset
    software = sorted(record.software.items())
    environment_variables = sorted(record.environment.items())
    return {
        "made": record.created_utc,
        "host": f"{host.name}, {host.cpu}, {host.cores} cores, {units.size(host.memory_bytes)}",
        "devices": ", ".join(host.devices),
        "driver": host.driver,
        "interconnect": host.interconnect,
        "entry": record.entry.path,
        "Megatron": megatron,
        "kit commit": record.kit_commit,
        "code": str(record.code) if record.code else None,
        "software": ", ".join(f"{name} {version}" for name, version in software),
        "data": data.prefix if data else None,
        "data sha256": data.sha256 if data else None,
        "start checkpoint": record.start_checkpoint,
        "starting weights": record.start_weights,
        "seed": str(record.spec.seed),
        "environment": " ".join(f"{name}={value}" for name, value in environment_variables),
        "command": shlex.join(record.command),
    }
