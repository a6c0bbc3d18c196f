"""Traced iterations of a report's runs as charts, and `trace` on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.records.run import TRACE_FILE
from tools.report.analyse.report_data import Entry
from tools.report.canvas import Chart
from tools.report.explain.pipeline_picture import Scene, draw_iteration
from tools.report.explain.trace import Piece, read_trace
from tools.report.read.runs import Run, find_run_folders, load_folder

PICTURE = "timeline.svg"
MAX_PICTURES = 8


class NoTraceError(ValueError):
    """There is nothing to draw; the message says what is missing and how to get it."""


def timeline_charts(entries: Sequence[Entry]) -> list[Chart]:
    """A picture for every entry that left a trace, the first eight."""
    charts: list[Chart] = []
    for entry in entries:
        if len(charts) < MAX_PICTURES and (entry.run.path / TRACE_FILE).is_file():
            name = f"timeline-{len(charts) + 1}"
            try:
                charts.append(draw_iteration(scene_of(entry.run, name, entry.label)))
            except NoTraceError:
                continue
    return charts


def scene_of(run: Run, name: str = "timeline", label: str = "") -> Scene:
    """What to draw of a run.

    Raises:
        NoTraceError: It left no usable trace, or its split is not known.
    """
    split, batch = run.setup.parallelism, run.setup.batch
    if split is None or batch is None or not batch.micro_batch_size:
        raise NoTraceError(
            f"{run.name} does not say how it was split, so its passes have no place."
        )
    microbatches = max(1, batch.global_batch_size // (batch.micro_batch_size * split.data))
    try:
        pieces = read_trace(run.path, split, microbatches)
    except FileNotFoundError:
        raise NoTraceError(
            f"{run.name} has no {TRACE_FILE}; train at least 5 iterations with the ledger on."
        ) from None
    except (OSError, ValueError) as error:
        raise NoTraceError(f"{run.name}: {TRACE_FILE} cannot be used ({error}).") from None
    shown = tuple(_without_single_ranks(run, pieces))
    if not shown:
        raise NoTraceError(f"{run.name} traced nothing; train at least 5 iterations.")
    title = f"Iteration of {label or run.setup.strategy}, {run.setup.model}"
    return Scene(name, title, shown, split, microbatches, run.setup.device != "cpu")


def write_timeline(run: Run) -> tuple[Path, str]:
    """Draw a run's iteration into its folder; gives the picture and what it shows.

    Raises:
        NoTraceError: As `scene_of`.
    """
    chart = draw_iteration(scene_of(run))
    path = run.path / PICTURE
    path.write_text(chart.svg)
    return path, chart.text


def find_run(wanted: str | None, root: Path) -> Run:
    """A run folder by path, or the newest of a target such as `pp2-gpt2-tiny-2cpu`, or the newest.

    Raises:
        NoTraceError: There is no such run.
    """
    if wanted and Path(wanted).is_dir():
        return load_folder(Path(wanted))
    target = (wanted or "").removeprefix("train-").removeprefix("trace-")
    folders = [f for f in find_run_folders(root) if not target or f.name.endswith(f"-{target}")]
    if not folders:
        what = f"of {target} " if target else ""
        raise NoTraceError(
            f"There is no run {what}in {root}; make trace-<strategy>-<model>-<N>cpu trains one."
        )
    return load_folder(folders[-1])


def _without_single_ranks(run: Run, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Leave out calls in groups of one rank: Megatron makes them, nothing moves."""
    record = run.ledgers.communication
    single = {c.group for r in record.ranks for c in r.calls if c.ranks == 1} if record else set()
    return (piece for piece in pieces if not (piece.is_call and piece.group in single))
