"""`report.html`: one file that opens offline; every text from a log is escaped by the template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.report import wording
from tools.report.charts import Chart
from tools.report.report_data import Report

_TEMPLATE = "page.html.j2"


def render_page(report: Report, charts: Sequence[Chart]) -> str:
    """The whole report as one HTML file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["w"] = wording
    template = environment.get_template(_TEMPLATE)
    return template.render(report=report, charts=charts, sentences=wording.sentences(report))
