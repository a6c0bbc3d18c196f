"""A sweep's report folder: `sweep.md`, `sweep.json`, `sweep.svg`, beside the cells it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tools.plan.tensors import parameters_total
from tools.report.analyse.provenance import conditions
from tools.report.analyse.report import rows_of
from tools.report.analyse.statistics import Estimate, TimeComparison
from tools.report.canvas import WIDTH_INCHES, Chart, colour, draw, grid
from tools.spec.run import Backend, DeviceKind
from tools.study.cells import Skipped
from tools.study.runner import CellResult
from tools.study.tables.overtaking import Swept, compare_tokens, fastest, verdicts
from tools.text.table import Column, Table, markdown_table, markdown_text
from tools.text.units import DASH, count, interval, loss, number, parameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS_FILE = "cells.json"
_MARKERS = "osD^vPX*"
TEXT_FILE, DATA_FILE, PICTURE_FILE = "sweep.md", "sweep.json", "sweep.svg"


def swept(results: Sequence[CellResult]) -> list[Swept]:
    """What was measured of each cell's runs that ended well, repeats together."""
    return [
        Swept(
            cell=result.cell,
            backend=Backend(result.launch.spec.backend),
            parameters=parameters_total(result.launch.model.shape),
            tokens_per_iteration=result.launch.spec.tokens_per_iteration,
            row=row,
            runs=tuple(folder.name for folder in result.runs),
            complete=result.complete,
            failure=result.failure,
        )
        for result, row in zip(results, rows_of([r.runs for r in results]), strict=True)
    ]


def write_results(folder: Path, results: Sequence[Swept], skipped: Sequence[Skipped]) -> str:
    """Write the files; return what they say, for the terminal."""
    chart = draw_sweep(results)
    if chart:
        (folder / PICTURE_FILE).write_text(chart.svg)
    text = render(folder.name, results, skipped, bool(chart))
    (folder / TEXT_FILE).write_text(text + "\n")
    data = msgspec.json.encode([_as_data(result) for result in results])
    (folder / DATA_FILE).write_bytes(msgspec.json.format(data, indent=2) + b"\n")
    return f"{text}\n\nSweep: {folder / TEXT_FILE}"


def render(
    name: str, results: Sequence[Swept], skipped: Sequence[Skipped], pictured: bool = False
) -> str:
    """Markdown: the sentences first, then the picture, the table and what was skipped."""
    rows = tuple(_SweepRow(result, _reference(result, results)) for result in results)
    said = "\n".join(f"- {text}" for text in _sentences(results))
    parts = [f"# Sweep {markdown_text(name)}", said]
    if pictured:
        parts.append(f"![Tokens a second by model size]({PICTURE_FILE})")
    parts.append(markdown_table(Table(_COLUMNS, rows)))
    if skipped:
        parts += ["## Skipped", markdown_table(Table(_SKIPPED, tuple(skipped)))]
    return "\n\n".join(parts)


@dataclass(frozen=True)
class _SweepRow:
    result: Swept
    reference: Swept | None

    @property
    def against(self) -> TimeComparison | None:
        return compare_tokens(self.reference, self.result) if self.reference else None


def _sentences(results: Sequence[Swept]) -> list[str]:
    """Verdicts, and what they rest on."""
    said = verdicts(results)
    processor = [_by_processor(result) for result in results]
    if any(result.estimate for result in processor):
        said += [f"By processor time: {text}" for text in verdicts(processor)]
    if any(result.cell.device is DeviceKind.CPU for result in results):
        said.append("Times on CPU ranks are illustrative: no GPU's balance is in them.")
    missing = [result for result in results if not result.complete]
    if missing:
        said.append(
            f"{len(missing)} of {len(results)} cells are not complete; the same command resumes."
        )
    rows = [result.row for result in results if result.row]
    return [*said, *conditions(run for row in rows for run in row.configuration.runs)]


def _by_processor(result: Swept) -> Swept:
    """On CPU ranks the same cell by processor time, which other work on the machine hardly changes."""
    known = result.row if result.cell.device is DeviceKind.CPU else None
    return replace(result, row=known, by_processor=True)


def _reference(result: Swept, results: Sequence[Swept]) -> Swept | None:
    """The same cell under the sweep's first backend; None for that backend itself."""
    first = results[0].backend
    same = (
        other for other in results if other.backend is first and other.cell.job == result.cell.job
    )
    return None if result.backend is first else next(same, None)


def _time(found: Estimate | None) -> str:
    if found is None:
        return DASH
    if found.low is None or found.high is None:
        return number(found.median)
    return f"{number(found.median)} [{interval(found.low, found.high)}]"


def _against(found: TimeComparison | None) -> str:
    if found is None:
        return ""
    span = f" [{found.low:.3f}–{found.high:.3f}]" if found.low and found.high else ""
    return f"×{found.ratio:.3f}{span} the time: {found.verdict}"


_COLUMNS: tuple[Column[_SweepRow], ...] = (
    Column("Model", lambda row: row.result.cell.model),
    Column("Parameters", lambda row: row.result.parameters, parameters),
    Column("Devices", lambda row: f"{row.result.cell.devices}{row.result.cell.device}"),
    Column("Strategy", lambda row: row.result.cell.strategy),
    Column("Backend", lambda row: row.result.backend),
    Column("ms/iteration [95%]", lambda row: row.result.estimate, _time),
    Column("Processor ms, all ranks [95%]", lambda row: _by_processor(row.result).estimate, _time),
    Column("Tokens/s", lambda row: row.result.tokens_per_second, number),
    Column("Against the first backend", lambda row: row.against, _against),
    Column("Loss", lambda row: _final_loss(row.result), loss),
    Column("Runs", lambda row: len(row.result.runs), count),
    Column("Notes", lambda row: row.result.failure),
)


_SKIPPED = (
    Column[Skipped]("Cell", lambda one: one.cell.name),
    Column[Skipped]("Rule", lambda one: one.rule),
)


def _final_loss(result: Swept) -> float | None:
    return result.row.final_loss if result.row else None


def _as_data(result: Swept) -> dict[str, object]:
    cell, found = result.cell, result.estimate
    processor = _by_processor(result).estimate
    return {
        "model": cell.model,
        "parameters": result.parameters,
        "strategy": cell.strategy,
        "backend": result.backend,
        "devices": cell.devices,
        "device": cell.device,
        "iteration_ms_median": found.median if found else None,
        "iteration_ms_ci_low": found.low if found else None,
        "iteration_ms_ci_high": found.high if found else None,
        "processor_ms_median": processor.median if processor else None,
        "samples": found.count if found else 0,
        "tokens_per_iteration": result.tokens_per_iteration,
        "tokens_per_second": result.tokens_per_second,
        "final_loss": _final_loss(result),
        "runs": result.runs,
        "complete": result.complete,
        "failure": result.failure or None,
    }


def draw_sweep(results: Sequence[Swept]) -> Chart | None:
    """The picture; None while nothing was measured."""
    if not any(result.estimate for result in results):
        return None
    text = (
        "Tokens a second over all devices at the median iteration, with 95% intervals; where a "
        "backend has several strategies on as many devices, its fastest."
    )
    return draw("sweep", "Throughput by model size", text, partial(_paint, results=results))


def _paint(figure: Figure, results: Sequence[Swept]) -> None:
    figure.set_size_inches(WIDTH_INCHES, 4.0)
    axes = figure.add_subplot()
    for place, ((devices, backend), line) in enumerate(fastest(results).items()):
        rates = [one.tokens_per_second or 0.0 for one in line]
        spans = [one.rate_interval or (rate, rate) for one, rate in zip(line, rates, strict=True)]
        axes.errorbar(
            [one.parameters for one in line],
            rates,
            yerr=[
                [rate - low for rate, (low, _) in zip(rates, spans, strict=True)],
                [high - rate for rate, (_, high) in zip(rates, spans, strict=True)],
            ],
            label=f"{backend}, {devices[0]} {devices[1]}",
            color=colour(place),
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=5,
            capsize=3,
            linewidth=1.4,
        )
    sizes = {one.parameters: one.cell.model for one in results if one.estimate}
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(
        list(sizes), [f"{name}\n{parameters(number)}" for number, name in sizes.items()]
    )
    axes.set_xticks([], minor=True)
    axes.set_ylabel("tokens a second")
    axes.legend()
    grid(axes)
