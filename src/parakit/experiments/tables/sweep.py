"""Write the report of a sweep: `sweep.md`, `sweep.json` and `sweep.svg`, and `cells.json` with the sweep's cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from parakit.artifacts.io import write_record
from parakit.config.errors import LaunchError
from parakit.config.run import DeviceKind
from parakit.experiments.definition import Cell
from parakit.experiments.engine import Output, PlannedCells, Study, describe_skipped
from parakit.experiments.tables import format_bullets
from parakit.experiments.tables.overtaking import (
    SweptCell,
    compare_time_per_token,
    describe_sweep,
    select_fastest,
)
from parakit.formatting.table import Column, Table, markdown_table, markdown_text
from parakit.formatting.terminal import say, say_markdown
from parakit.formatting.units import DASH, count, interval, loss, number, parameters
from parakit.reporting import (
    WIDTH_INCHES,
    Chart,
    Estimate,
    add_grid,
    build_entries_from_folders,
    describe_conditions,
    draw_chart,
    entry_colour,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from parakit.logs import Run

CELLS_FILE = "cells.json"
_MARKERS = "osD^vPX*"
"""Matplotlib's markers of the chart's lines."""
_SWEEP_VARIABLES = ("REPEATS", "DRY_RUN", "RUN_FOLDER")
"""Variables that change what the sweep does, not what a cell trains."""
TEXT_FILE, DATA_FILE, PICTURE_FILE = "sweep.md", "sweep.json", "sweep.svg"


def write_cells(study: Study) -> None:
    """Write `cells.json` into the report's folder.

    Raises:
        LaunchError: No cell is legal here; nothing was trained.
    """
    if not study.planned.launches:
        raise LaunchError("No cell of this sweep can run here; the rules are above.")
    study.folder.mkdir(parents=True, exist_ok=True)
    (study.folder / CELLS_FILE).write_text(encode_sweep_cells(study.planned) + "\n")


def encode_sweep_cells(planned: PlannedCells) -> str:
    """Return `cells.json`: name, target and variables of each cell, and the skipped cells with their rules.

    Any launcher can run the cells from it. A sweep that runs afterwards finds these runs.
    """
    cells = []
    for cell in planned.launches:
        job_variables = {
            name: text for name, text in cell.job.variables.items() if name not in _SWEEP_VARIABLES
        }
        cells.append({"name": cell.name, "target": cell.job.target, "variables": job_variables})
    skipped = [{"name": cell.name, "rule": rule} for cell, rule in planned.skipped.items()]
    data = msgspec.json.encode({"cells": cells, "skipped": skipped})
    return msgspec.json.format(data, indent=2).decode()


def write_sweep(study: Study) -> int:
    """Write and print the report of all cells that have runs; return 0 if every cell is complete."""
    rows = build_entries_from_folders([result.runs for result in study.results])
    cells = [
        SweptCell(result, row, row.estimate if row else None)
        for result, row in zip(study.results, rows, strict=True)
    ]
    folder, chart = study.folder, draw_sweep(cells)
    if chart:
        (folder / PICTURE_FILE).write_text(chart.svg)
    text = render(folder.name, cells, study.planned.skipped, has_picture=bool(chart))
    (folder / TEXT_FILE).write_text(text + "\n")
    write_record(folder / DATA_FILE, list(map(_encode_result, cells)))
    say_markdown(study.console, text)
    say(study.console, f"Sweep: {folder / TEXT_FILE}")
    return int(not study.is_complete)


OUTPUT = Output(
    write_sweep,
    announce=write_cells,
    format_dry_run=encode_sweep_cells,
    finishes_if_interrupted=True,
)


def render(
    name: str,
    results: Sequence[SweptCell],
    skipped: Mapping[Cell, str],
    has_picture: bool = False,
) -> str:
    """Return the report in Markdown: sentences first, then the picture, the table and the skipped cells."""
    parts = [f"# Sweep {markdown_text(name)}", format_bullets(_make_sentences(results))]
    if has_picture:
        parts.append(f"![Tokens a second by model size]({PICTURE_FILE})")
    parts.append(markdown_table(Table(_make_columns(results), tuple(results))))
    if skipped:
        parts += ["## Skipped", format_bullets(describe_skipped(skipped))]
    return "\n\n".join(parts)


def _make_sentences(results: Sequence[SweptCell]) -> list[str]:
    """Return who overtakes whom, by wall clock and by processor time, and what limits these statements."""
    sentences = describe_sweep(results)
    by_processor = [_use_processor_time(cell) for cell in results]
    if any(cell.estimate for cell in by_processor):
        sentences += [f"By processor time: {text}" for text in describe_sweep(by_processor)]
    if any(cell.job.device is DeviceKind.CPU for cell in results):
        sentences.append("Times on CPU ranks are illustrative: no GPU's balance is in them.")
    num_incomplete = sum(not cell.result.is_complete for cell in results)
    if num_incomplete:
        sentences.append(
            f"{num_incomplete} of {len(results)} cells are not complete; the same command resumes."
        )
    runs: list[Run] = []
    for cell in results:
        if cell.row:
            runs += cell.row.configuration.runs
    return [*sentences, *describe_conditions(runs)]


def _use_processor_time(cell: SweptCell) -> SweptCell:
    """Return a cell with processor time, which other work on the machine hardly changes.

    A cell on GPUs, or without runs, gets no time.
    """
    row = cell.row if cell.job.device is DeviceKind.CPU else None
    return replace(cell, estimate=row.processor_ms if row else None)


def _format_time(estimate: Estimate | None) -> str:
    """Return the median in milliseconds and, if known, the 95% interval; a dash for None."""
    if estimate is None:
        return DASH
    if estimate.low is None or estimate.high is None:
        return number(estimate.median)
    return f"{number(estimate.median)} [{interval(estimate.low, estimate.high)}]"


def _make_columns(results: Sequence[SweptCell]) -> tuple[Column[SweptCell], ...]:
    """Return the table's columns; cells are compared with the same cell under the sweep's first backend."""
    first_backend = results[0].backend
    references: dict[str, SweptCell] = {}
    for cell in results:
        if cell.backend is first_backend:
            references.setdefault(cell.job.name, cell)

    def compare_with_first(cell: SweptCell) -> str:
        reference = references.get(cell.job.name)
        if reference is None or cell.backend is first_backend:
            return ""
        return _compare_with_reference(reference, cell)

    def estimate_processor_time(cell: SweptCell) -> Estimate | None:
        return _use_processor_time(cell).estimate

    def get_loss(cell: SweptCell) -> float | None:
        return cell.row.final_loss if cell.row else None

    return (
        Column("Model", attrgetter("job.model.name")),
        Column("Parameters", attrgetter("parameters"), parameters),
        Column("Devices", attrgetter("job.device_suffix")),
        Column("Strategy", attrgetter("job.strategy")),
        Column("Batch (micro/global)", attrgetter("result.launch.spec.batch")),
        Column("Backend", attrgetter("backend")),
        Column("ms/iteration [95%]", attrgetter("estimate"), _format_time),
        Column("Processor ms, all ranks [95%]", estimate_processor_time, _format_time),
        Column("Tokens/s", attrgetter("tokens_per_second"), number),
        Column("Against the first backend", compare_with_first),
        Column("Loss", get_loss, loss),
        Column("Runs", lambda cell: len(cell.result.runs), count),
        Column("Notes", attrgetter("result.failure")),
    )


def _compare_with_reference(reference: SweptCell, cell: SweptCell) -> str:
    """Return a cell's time as a multiple of the reference's, with interval and verdict; empty without both times."""
    time = compare_time_per_token(reference, cell)
    if time is None:
        return ""
    span = f" [{time.low:.3f}–{time.high:.3f}]" if time.low and time.high else ""
    return f"×{time.ratio:.3f}{span} the time: {time.verdict}"


def _encode_result(cell: SweptCell) -> dict[str, object]:
    """Return a cell's entry of `sweep.json`; None where something was not measured."""
    job, result = cell.job, cell.result
    batch = result.launch.spec.batch
    median = low = high = None
    num_samples = 0
    if cell.estimate:
        median, low, high = cell.estimate.median, cell.estimate.low, cell.estimate.high
        num_samples = cell.estimate.count
    processor = _use_processor_time(cell).estimate
    return {
        "model": job.model.name,
        "parameters": cell.parameters,
        "strategy": job.strategy,
        "backend": cell.backend,
        "devices": job.devices,
        "micro_batch": batch.micro_batch_size,
        "global_batch": batch.global_batch_size,
        "device": job.device,
        "iteration_ms_median": median,
        "iteration_ms_ci_low": low,
        "iteration_ms_ci_high": high,
        "processor_ms_median": processor.median if processor else None,
        "samples": num_samples,
        "tokens_per_iteration": cell.tokens_per_iteration,
        "tokens_per_second": cell.tokens_per_second,
        "final_loss": cell.row.final_loss if cell.row else None,
        "runs": [folder.name for folder in result.runs],
        "complete": result.is_complete,
        "failure": result.failure or None,
    }


def draw_sweep(results: Sequence[SweptCell]) -> Chart | None:
    """Draw tokens per second by model size; return None if nothing was measured."""
    if not any(cell.estimate for cell in results):
        return None
    text = (
        "Tokens a second over all devices at the median iteration, with 95% intervals; where a "
        "backend has several strategies on as many devices, its fastest."
    )
    return draw_chart(
        "sweep", "Throughput by model size", text, partial(_paint_chart, results=results)
    )


def _paint_chart(figure: Figure, results: Sequence[SweptCell]) -> None:
    """Paint a line with error bars per backend and number of devices into a figure."""
    figure.set_size_inches(WIDTH_INCHES, 4.0)
    axes = figure.add_subplot()
    for index, (series, cells) in enumerate(select_fastest(results).items()):
        (num_devices, kind), backend = series
        axes.errorbar(
            [cell.parameters for cell in cells],
            [cell.tokens_per_second or 0.0 for cell in cells],
            yerr=_measure_error_bars(cells),
            label=f"{backend}, {num_devices} {kind}",
            color=entry_colour(index),
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            capsize=3,
            linewidth=1.4,
        )
    sizes = {cell.parameters: cell.job.model.name for cell in results if cell.estimate}
    labels = [f"{name}\n{parameters(size)}" for size, name in sizes.items()]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(list(sizes), labels)
    axes.set_xticks([], minor=True)
    axes.set_ylabel("tokens a second")
    axes.legend()
    add_grid(axes)


def _measure_error_bars(cells: Sequence[SweptCell]) -> tuple[list[float], list[float]]:
    """Return the lengths of the error bars below and above the tokens per second; 0 for a cell without an interval."""
    below: list[float] = []
    above: list[float] = []
    for cell in cells:
        rate = cell.tokens_per_second or 0.0
        low, high = cell.rate_interval or (rate, rate)
        below.append(rate - low)
        above.append(high - rate)
    return below, above
