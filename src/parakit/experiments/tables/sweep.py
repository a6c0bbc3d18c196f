"""A sweep's report folder: `sweep.md`, `sweep.json`, `sweep.svg`, beside the cells it was made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
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

CELLS_FILE = "cells.json"
_MARKERS = "osD^vPX*"
_SWEEP_VARIABLES = ("REPEATS", "DRY_RUN", "RUN_FOLDER")
"""Variables that say what the sweep does, not what a cell trains."""
TEXT_FILE, DATA_FILE, PICTURE_FILE = "sweep.md", "sweep.json", "sweep.svg"


def write_cells(study: Study) -> None:
    """Leave the cells beside the table.

    Raises:
        LaunchError: No cell is legal here; nothing was trained.
    """
    if not study.planned.launches:
        raise LaunchError("No cell of this sweep can run here; the rules are above.")
    study.folder.mkdir(parents=True, exist_ok=True)
    (study.folder / CELLS_FILE).write_text(encode_sweep_cells(study.planned) + "\n")


def encode_sweep_cells(planned: PlannedCells) -> str:
    """`cells.json`: target and variables of each cell; the skipped ones with their rule.

    A launcher of any kind can take them; a sweep that runs afterwards finds what it made.
    """
    cells = [
        {
            "name": cell.name,
            "target": cell.job.target,
            "variables": {
                name: text
                for name, text in cell.job.variables.items()
                if name not in _SWEEP_VARIABLES
            },
        }
        for cell in planned.launches
    ]
    skipped = [{"name": cell.name, "rule": rule} for cell, rule in planned.skipped.items()]
    data = msgspec.json.encode({"cells": cells, "skipped": skipped})
    return msgspec.json.format(data, indent=2).decode()


def write_sweep(study: Study) -> int:
    """Write what there is and say it; 0 if all is there."""
    rows = build_entries_from_folders([result.runs for result in study.results])
    results = [
        SweptCell(result, row, row.estimate if row else None)
        for result, row in zip(study.results, rows, strict=True)
    ]
    folder, chart = study.folder, draw_sweep(results)
    if chart:
        (folder / PICTURE_FILE).write_text(chart.svg)
    text = render(folder.name, results, study.planned.skipped, bool(chart))
    (folder / TEXT_FILE).write_text(text + "\n")
    write_record(folder / DATA_FILE, list(map(_encode_result, results)))
    say_markdown(study.console, text)
    say(study.console, f"Sweep: {folder / TEXT_FILE}")
    return int(not study.all_well)


OUTPUT = Output(write_sweep, begin=write_cells, shown=encode_sweep_cells, also_interrupted=True)


def render(
    name: str, results: Sequence[SweptCell], skipped: Mapping[Cell, str], pictured: bool = False
) -> str:
    """Markdown: the sentences first, then the picture, the table and what was skipped."""
    parts = [f"# Sweep {markdown_text(name)}", format_bullets(_make_sentences(results))]
    if pictured:
        parts.append(f"![Tokens a second by model size]({PICTURE_FILE})")
    parts.append(markdown_table(Table(_make_columns(results), tuple(results))))
    if skipped:
        parts += ["## Skipped", format_bullets(describe_skipped(skipped))]
    return "\n\n".join(parts)


def _make_sentences(results: Sequence[SweptCell]) -> list[str]:
    """Verdicts, and what they rest on."""
    said = describe_sweep(results)
    processor = [_use_processor_time(result) for result in results]
    if any(result.estimate for result in processor):
        said += [f"By processor time: {text}" for text in describe_sweep(processor)]
    if any(result.job.device is DeviceKind.CPU for result in results):
        said.append("Times on CPU ranks are illustrative: no GPU's balance is in them.")
    if missing := sum(not one.result.complete for one in results):
        said.append(
            f"{missing} of {len(results)} cells are not complete; the same command resumes."
        )
    rows = [result.row for result in results if result.row]
    return [*said, *describe_conditions(run for row in rows for run in row.configuration.runs)]


def _use_processor_time(result: SweptCell) -> SweptCell:
    """On CPU ranks the same cell by processor time, which other work on the machine hardly changes."""
    known = result.row if result.job.device is DeviceKind.CPU else None
    return replace(result, estimate=known.processor_ms if known else None)


def _format_time(found: Estimate | None) -> str:
    if found is None:
        return DASH
    if found.low is None or found.high is None:
        return number(found.median)
    return f"{number(found.median)} [{interval(found.low, found.high)}]"


def _make_columns(results: Sequence[SweptCell]) -> tuple[Column[SweptCell], ...]:
    first = results[0].backend
    references = {one.job.name: one for one in results[::-1] if one.backend is first}

    def against(result: SweptCell) -> str:
        """The same cell under the sweep's first backend."""
        reference = references.get(result.job.name) if result.backend is not first else None
        found = compare_time_per_token(reference, result) if reference else None
        if found is None:
            return ""
        span = f" [{found.low:.3f}–{found.high:.3f}]" if found.low and found.high else ""
        return f"×{found.ratio:.3f}{span} the time: {found.verdict}"

    return (
        Column("Model", lambda one: one.job.model.name),
        Column("Parameters", lambda one: one.parameters, parameters),
        Column("Devices", lambda one: one.job.device_suffix),
        Column("Strategy", lambda one: one.job.strategy),
        Column("Batch (micro/global)", lambda one: str(one.result.launch.spec.batch)),
        Column("Backend", lambda one: one.backend),
        Column("ms/iteration [95%]", lambda one: one.estimate, _format_time),
        Column(
            "Processor ms, all ranks [95%]",
            lambda one: _use_processor_time(one).estimate,
            _format_time,
        ),
        Column("Tokens/s", lambda one: one.tokens_per_second, number),
        Column("Against the first backend", against),
        Column("Loss", lambda one: one.row and one.row.final_loss, loss),
        Column("Runs", lambda one: len(one.result.runs), count),
        Column("Notes", lambda one: one.result.failure),
    )


def _encode_result(one: SweptCell) -> dict[str, object]:
    job, found, result = one.job, one.estimate, one.result
    batch, processor = result.launch.spec.batch, _use_processor_time(one).estimate
    return {
        "model": job.model.name,
        "parameters": one.parameters,
        "strategy": job.strategy,
        "backend": one.backend,
        "devices": job.devices,
        "micro_batch": batch.micro_batch_size,
        "global_batch": batch.global_batch_size,
        "device": job.device,
        "iteration_ms_median": found.median if found else None,
        "iteration_ms_ci_low": found.low if found else None,
        "iteration_ms_ci_high": found.high if found else None,
        "processor_ms_median": processor.median if processor else None,
        "samples": found.count if found else 0,
        "tokens_per_iteration": one.tokens_per_iteration,
        "tokens_per_second": one.tokens_per_second,
        "final_loss": one.row and one.row.final_loss,
        "runs": [folder.name for folder in result.runs],
        "complete": result.complete,
        "failure": result.failure or None,
    }


def draw_sweep(results: Sequence[SweptCell]) -> Chart | None:
    """The picture; None while nothing was measured."""
    if not any(result.estimate for result in results):
        return None
    text = (
        "Tokens a second over all devices at the median iteration, with 95% intervals; where a "
        "backend has several strategies on as many devices, its fastest."
    )
    return draw_chart(
        "sweep", "Throughput by model size", text, partial(_paint_chart, results=results)
    )


def _paint_chart(figure: Figure, results: Sequence[SweptCell]) -> None:
    figure.set_size_inches(WIDTH_INCHES, 4.0)
    axes = figure.add_subplot()
    for place, ((devices, backend), line) in enumerate(select_fastest(results).items()):
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
            color=entry_colour(place),
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=5,
            capsize=3,
            linewidth=1.4,
        )
    sizes = {one.parameters: one.job.model.name for one in results if one.estimate}
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(
        list(sizes), [f"{name}\n{parameters(number)}" for number, name in sizes.items()]
    )
    axes.set_xticks([], minor=True)
    axes.set_ylabel("tokens a second")
    axes.legend()
    add_grid(axes)
