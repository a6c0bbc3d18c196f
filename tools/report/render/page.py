"""`report.html`: one file that opens offline; every text from a log is escaped by the template."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.report.analyse.report_data import Entry, Report
from tools.report.analyse.rows import memory_by_rank
from tools.report.canvas import Chart
from tools.report.explain.explanation import Explanation
from tools.report.render import wording
from tools.text import units

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_ARGUMENTS = 120


@dataclass(frozen=True)
class Cell:
    """One cell of the sortable table: what is read, and what is sorted by."""

    text: str
    key: float | str = ""
    kind: str = ""
    """Class of the cell: `number`, or a status that has a colour."""


def render_page(
    report: Report, charts: Sequence[Chart], explanation: Explanation | None = None
) -> str:
    """The whole report as one HTML file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    header, lines = results_table(report)
    return environment.get_template("page.html.j2").render(
        report=report,
        charts=charts,
        explanation=explanation or Explanation(),
        sentences=wording.sentences(report),
        header=header,
        lines=lines,
        arguments=report.arguments[:_MAX_ARGUMENTS],
        arguments_left=max(0, len(report.arguments) - _MAX_ARGUMENTS),
        memory_by_rank=memory_by_rank,
        provenance=provenance,
        w=units,
        wording=wording,
    )


def results_table(report: Report) -> tuple[list[str], list[list[Cell]]]:
    """Header and lines of the results table; a column of which nothing is known is left out."""
    lines = [cells(entry) for entry in report.entries]
    names = list(lines[0]) if lines else []
    known = [n for n in names if any(line[n].text not in ("", units.DASH) for line in lines)]
    return known, [[line[name] for name in known] for line in lines]


def cells(entry: Entry) -> dict[str, Cell]:
    """Every cell of an entry's line by its column's name."""
    row, rates = entry.row, entry.rates
    token = entry.speed.per_token if entry.speed else None
    low, high = row.iteration_ms_ci_low, row.iteration_ms_ci_high
    interval = units.DASH if low is None else f"{units.number(low)} – {units.number(high)}"
    parity = (row.parity or "").split("@")[0].replace(" ", "-")
    published = entry.figure.mean_iteration_ms if entry.figure else None
    return {
        "Strategy": Cell(entry.label, entry.label),
        "Model": Cell(row.model or units.DASH, row.model or ""),
        "Device": Cell(row.device or units.DASH, row.device or ""),
        "Status": Cell(row.status, row.status, f"status {row.status}"),
        "ms/iteration": _number(row.iteration_ms_median),
        "95% interval": Cell(interval, "" if low is None else low, "number"),
        "Time a token": _number(token.ratio if token else None, wording.speed(entry)),
        "Tokens/s": _number(row.tokens_per_second),
        "Final loss": _number(row.final_loss, units.loss(row.final_loss)),
        "Parity": Cell(row.parity or units.DASH, row.parity or "", f"parity {parity}"),
        "Parameters/rank": _number(row.parameters_max_rank, units.count(row.parameters_max_rank)),
        "Peak memory": _number(row.peak_memory_bytes, units.size(row.peak_memory_bytes)),
        "Device memory": _number(row.device_memory_bytes, units.size(row.device_memory_bytes)),
        "Sent/iteration": _number(
            row.comm_bytes_per_iteration, units.size(row.comm_bytes_per_iteration)
        ),
        "Tokens/s/device": _number(row.tokens_per_second_per_device),
        "TFLOP/s/device": _number(row.model_tflops_per_device),
        "MFU": _number(row.mfu, units.percent(row.mfu)),
        "HFU": _number(rates.hfu, units.percent(rates.hfu)),
        "Published ms": _number(published, wording.published(entry)),
    }


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
            "host": f"{host.name}, {host.cpu}, {host.cores} cores, {units.size(host.memory_bytes)}",
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
            "seed": str(record.spec.seed),
            "environment": " ".join(f"{k}={v}" for k, v in sorted(record.environment.items())),
            "command": shlex.join(record.command),
        }
    return {name: value for name, value in facts.items() if value}


def _number(value: float | None, text: str | None = None) -> Cell:
    shown = units.number(value) if text is None else text
    return Cell(shown, "" if value is None else value, "number")
