"""A sweep's report folder: `sweep.md`, `sweep.json`, `sweep.svg`, beside the cells it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tools.launch.sweep.cells import Skipped
from tools.launch.sweep.picture import draw_sweep
from tools.launch.sweep.results import Measured, compare_tokens
from tools.launch.sweep.verdicts import size, verdicts
from tools.records import run as records
from tools.report.analyse.statistics import Comparison
from tools.spec.run import Backend, DeviceKind
from tools.text.table import markdown_rows, markdown_text
from tools.text.units import DASH, count, loss, number

CELLS_FILE = "cells.json"
TEXT_FILE, DATA_FILE, PICTURE_FILE = "sweep.md", "sweep.json", "sweep.svg"

_HEADER = ["Model", "Parameters", "Devices", "Strategy", "Backend", "ms/iteration [95%]"]
_HEADER += ["Tokens/s", "Against the first backend", "Loss", "Runs", "Notes"]


def write_results(folder: Path, results: Sequence[Measured], skipped: Sequence[Skipped]) -> str:
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
    name: str, results: Sequence[Measured], skipped: Sequence[Skipped], pictured: bool = False
) -> str:
    """Markdown: the sentences first, then the picture, the table and what was skipped."""
    parts = [
        f"# Sweep {markdown_text(name)}",
        "\n".join(f"- {text}" for text in sentences(results)),
    ]
    if pictured:
        parts.append(f"![Tokens a second by model size]({PICTURE_FILE})")
    parts.append(
        markdown_rows(_HEADER, [_row(result, _reference(result, results)) for result in results])
    )
    if skipped:
        rows = [[one.cell.name, one.rule] for one in skipped]
        parts += ["## Skipped", markdown_rows(["Cell", "Rule"], rows)]
    return "\n\n".join(parts)


def sentences(results: Sequence[Measured]) -> list[str]:
    """Verdicts, and what they rest on."""
    said = verdicts(results)
    if any(result.cell.device is DeviceKind.CPU for result in results):
        said.append("Times on CPU ranks are illustrative: no GPU's balance is in them.")
    missing = [result for result in results if not result.complete]
    if missing:
        said.append(
            f"{len(missing)} of {len(results)} cells are not complete; the same command goes on."
        )
    return [*said, *_conditions(results)]


def _conditions(results: Sequence[Measured]) -> list[str]:
    """The machine and the kit's commits, which no cell's times may be read without."""
    found = [records.read_run(folder) for result in results for folder in result.runs]
    machines = sorted({f"{run.host.cores} cores of {run.host.cpu}" for run in found})
    commits = sorted({(run.kit_commit or "no commit")[:12] for run in found})
    return [f"Measured on {'; '.join(machines)}, kit at {', '.join(commits)}."] if found else []


def _reference(result: Measured, results: Sequence[Measured]) -> Measured | None:
    """The same cell under the sweep's first backend; None for that backend itself."""
    first = results[0].cell.backend
    cell = result.cell
    same = (
        other
        for other in results
        if other.cell.backend is first
        and (other.cell.model, other.cell.target) == (cell.model, cell.target)
    )
    return None if cell.backend is first else next(same, None)


def _row(result: Measured, reference: Measured | None) -> list[str]:
    cell, found = result.cell, result.estimate
    return [
        cell.model,
        size(result.parameters),
        f"{cell.devices}{cell.device}",
        cell.strategy,
        cell.backend,
        DASH if found is None else _interval(found.median, found.low, found.high),
        number(result.tokens_per_second),
        _against(compare_tokens(reference, result) if reference else None),
        loss(result.final_loss),
        count(len(result.runs)),
        result.failure,
    ]


def _interval(median: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return number(median)
    return f"{number(median)} [{number(low)}–{number(high)}]"


def _against(found: Comparison | None) -> str:
    if found is None:
        return ""
    span = f" [{found.low:.3f}–{found.high:.3f}]" if found.low and found.high else ""
    return f"×{found.ratio:.3f}{span} the time: {found.verdict}"


def _as_data(result: Measured) -> dict[str, object]:
    cell, found = result.cell, result.estimate
    return {
        "model": cell.model,
        "parameters": result.parameters,
        "strategy": cell.strategy,
        "backend": Backend(cell.backend),
        "devices": cell.devices,
        "device": cell.device,
        "iteration_ms_median": found.median if found else None,
        "iteration_ms_ci_low": found.low if found else None,
        "iteration_ms_ci_high": found.high if found else None,
        "samples": found.count if found else 0,
        "tokens_per_iteration": result.tokens_per_iteration,
        "tokens_per_second": result.tokens_per_second,
        "final_loss": result.final_loss,
        "runs": [folder.name for folder in result.runs],
        "complete": result.complete,
        "failure": result.failure or None,
    }
