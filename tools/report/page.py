"""`report.html`: one file that opens offline; every text from a log is escaped by the template."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.report import wording
from tools.report.chart_canvas import Chart
from tools.report.report_data import Entry, Report
from tools.report.rows import memory_by_rank

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_ARGUMENTS = 120


@dataclass(frozen=True)
class Cell:
    """One cell of the sortable table: what is read, and what is sorted by."""

    text: str
    key: float | str = ""
    kind: str = ""
    """Class of the cell: `number`, or a status that has a colour."""


def render_page(report: Report, charts: Sequence[Chart]) -> str:
    """The whole report as one HTML file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        report=report,
        charts=charts,
        sentences=wording.sentences(report),
        header=HEADER,
        rows=[(entry, cells(entry)) for entry in report.entries],
        arguments=report.arguments[:_MAX_ARGUMENTS],
        arguments_left=max(0, len(report.arguments) - _MAX_ARGUMENTS),
        memory_by_rank=memory_by_rank,
        provenance=provenance,
        w=wording,
    )


HEADER = (
    *("Strategy", "Model", "Device", "Status", "ms/iteration", "95% interval", "Time a token"),
    *("Tokens/s", "Tokens/s/device", "TFLOP/s/device", "MFU", "HFU", "Final loss", "Parity"),
    *("Parameters/rank", "Peak memory", "Device memory", "Sent/iteration", "Published ms"),
)


def cells(entry: Entry) -> list[Cell]:
    """The cells of an entry's line in the results table, in the order of `HEADER`."""
    row, rates = entry.row, entry.rates
    token = entry.speed.per_token if entry.speed else None
    low, high = row.iteration_ms_ci_low, row.iteration_ms_ci_high
    interval = wording.DASH if low is None else f"{wording.number(low)} – {wording.number(high)}"
    parity = (row.parity or "").split("@")[0].replace(" ", "-")
    return [
        Cell(entry.label, entry.label),
        Cell(row.model or wording.DASH, row.model or ""),
        Cell(row.device or wording.DASH, row.device or ""),
        Cell(row.status, row.status, f"status {row.status}"),
        _number(row.iteration_ms_median, wording.number(row.iteration_ms_median)),
        _number(low, interval),
        _number(token.ratio if token else None, wording.speed(entry)),
        _number(row.tokens_per_second, wording.number(row.tokens_per_second)),
        _number(row.tokens_per_second_per_device, wording.number(row.tokens_per_second_per_device)),
        _number(row.model_tflops_per_device, wording.number(row.model_tflops_per_device)),
        _number(row.mfu, wording.percent(row.mfu)),
        _number(rates.hfu, wording.percent(rates.hfu)),
        _number(row.final_loss, wording.loss(row.final_loss)),
        Cell(row.parity or wording.DASH, row.parity or "", f"parity {parity}"),
        _number(row.parameters_max_rank, wording.count(row.parameters_max_rank)),
        _number(row.peak_memory_bytes, wording.size(row.peak_memory_bytes)),
        _number(row.device_memory_bytes, wording.size(row.device_memory_bytes)),
        _number(row.comm_bytes_per_iteration, wording.size(row.comm_bytes_per_iteration)),
        _number(entry.figure.mean_iteration_ms if entry.figure else None, wording.published(entry)),
    ]


def provenance(entry: Entry) -> Mapping[str, str]:
    """Where a run was made and with what; only what is known."""
    record, run = entry.run.record, entry.run
    facts: dict[str, str | None] = {"log": run.log.path, "first line": run.log.first_seen}
    facts["log format"] = f"Megatron {run.log.dialect}" if run.log.dialect else None
    clocks = [c for s in run.samples.series for c in s.sm_clock_mhz if c]
    facts["SM clock"] = f"{min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else None
    throttled = sorted({reason for s in run.samples.series for reason in s.throttled})
    facts["clock lowered by"] = ", ".join(throttled) or None
    if record is not None:
        host, entry_point = record.host, record.entry
        facts |= {
            "made": record.created_utc,
            "host": f"{host.name}, {host.cpu}, {host.cores} cores, {wording.size(host.memory_bytes)}",
            "devices": ", ".join(host.devices),
            "driver": host.driver,
            "interconnect": host.interconnect,
            "entry": entry_point.path,
            "Megatron": run.setup.megatron,
            "kit commit": record.kit_commit,
            "software": ", ".join(f"{name} {v}" for name, v in sorted(record.software.items())),
            "data": record.dataset.prefix if record.dataset else None,
            "data sha256": record.dataset.sha256 if record.dataset else None,
            "start checkpoint": record.start_checkpoint,
            "seed": str(record.seed),
            "environment": " ".join(f"{k}={v}" for k, v in sorted(record.environment.items())),
            "command": shlex.join(record.command),
        }
    return {name: value for name, value in facts.items() if value}


def _number(value: float | None, text: str) -> Cell:
    return Cell(text, "" if value is None else value, "number")
