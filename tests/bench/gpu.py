"""`make bench NAME=gpu`: Megatron on one GPU without Transformer Engine, measured against the published time.

Measures the ceilings of the device first, then trains the cells of `bench_gpu.yaml` while time lasts.
"""

from __future__ import annotations

import os
import shlex
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.flags import Flags
from parakit.config.run import DeviceKind, RuntimeName
from parakit.data.indexed import idx_path
from parakit.experiments.definition import Cell, Experiment
from parakit.experiments.engine import Output, Study, run_experiment
from parakit.experiments.load import load_experiment
from parakit.experiments.runner import NO_TIME, order_repeats
from parakit.launch import microbenchmark
from parakit.launch.data import DEFAULT_DATA
from parakit.launch.devices import visible_gpus
from parakit.launch.microbenchmark import Workload
from parakit.launch.options import Options
from parakit.launch.preflight_gpu import compiler_problem, torch_problem
from tests.bench.gpu_runs import (
    FOLDER,
    MARK_MS,
    Bench,
    BenchRow,
    Ceilings,
    bench_text,
    read_bench,
    timed_iterations,
    write_ceilings,
)

CEILINGS_SECONDS = 25.0
CEILINGS = Workload(
    matmul_size=16384, copy_bytes=4 << 30, seconds_each=4.0, warm_up_calls=5, mean=True
)
"""A product of 8.8e12 FLOP, a few hundredths of a second, and a copy of 4 GiB, far beyond any cache;
over several seconds, so that the clocks settle as they do in training."""
START_SECONDS = 40.0
"""Seconds from the command to the first iteration. The value is assumed, not measured."""

FIXED = (
    *("MICRO_BATCH", "GLOBAL_BATCH", "SEED", "DROPOUT", "EXTRA", "ITERS", "REPEATS", "FUSED"),
    *("BACKEND", "MEGATRON_LM", "SHARED_START", "SHARE_GPU", "SAVE_EVERY", "WANDB"),
)
"""Variables of the train command that a setting determines."""
_SHOWN = ("RUNTIME", "ITERS", "EXTRA", "LEDGER", "RUNS", "FUSED")

Run = tuple[int, Cell]
"""Number of a repeat, from 1, and its cell."""


def bench_gpu(
    only: str | None, budget: float | None, variables: Namespace, options: Options, console: Console
) -> int:
    """Measure. Return 0 if every started run succeeded.

    Raises:
        LaunchError: The bench cannot run here; nothing was written.
    """
    if fixed_variables := [name for name in FIXED if name in variables.texts]:
        raise LaunchError(
            f"{fixed_variables[0]}= is the settings' own in 'make bench NAME=gpu'; leave it out."
        )
    if options.runtime not in (None, RuntimeName.HOST):
        raise LaunchError(f"'make bench NAME=gpu' measures RUNTIME=host, not {options.runtime}.")
    # The published data set is used if it was prepared, otherwise the sample.
    published, sample = DEFAULT_DATA[DeviceKind.GPU], DEFAULT_DATA[DeviceKind.CPU]
    here = published if idx_path(ROOT / published).is_file() else sample
    experiment = settings(only or "", replace(options, data=options.data or here))
    seconds = budget or experiment.budget_seconds or 0.0
    if options.dry_run:
        print(describe(experiment.cells, seconds, options.data))
        return 0
    began = time.monotonic()
    if len(visible_gpus()) == 0:
        raise LaunchError(
            "make bench NAME=gpu measures an NVIDIA GPU, and none is visible here; DRY_RUN=1 shows what it "
            "would do."
        )
    if problem := torch_problem() or compiler_problem():
        raise LaunchError(problem)
    if ceilings := _ceilings(console):
        write_ceilings(options.runs, ceilings)
    seconds_left = seconds - (time.monotonic() - began)
    return run_experiment(replace(experiment, budget_seconds=seconds_left), OUTPUT, console)


def settings(only: str, options: Options) -> Experiment:
    """Return the cells of the file, or those of --only, with their expected seconds.

    Raises:
        LaunchError: A name of --only is not a setting.
    """
    experiment = load_experiment("bench_gpu", options, only=only.split())

    def expected(cell: Cell) -> float:
        # The plan assumes a start-up time and the published time per iteration. It is an estimate, not a result.
        return START_SECONDS + (cell.job.options.iterations or 0) * MARK_MS / 1000

    cells = (replace(cell, expected_seconds=expected(cell)) for cell in experiment.cells)
    return replace(experiment, cells=tuple(cells))


def describe(cells: Sequence[Cell], budget: float, data: str | None = None) -> str:
    """Return the plan as text: each run with its patches, its command and its expected seconds."""
    kept, left_out = fitting(order_repeats(cells), budget - CEILINGS_SECONDS)
    lines = [
        f"Ceilings of the device: a large bf16 product, a large copy (≈{CEILINGS_SECONDS:.0f} s)"
    ]
    environment = {variables.PYTHON: os.environ.get(variables.PYTHON, ""), "DATA": data or ""}
    for repeat, cell in kept:
        options = cell.job.options
        iterations = options.iterations or 0
        timed = len(timed_iterations(options.extra, iterations))
        job_variables = {**cell.job.variables, "RUNS": f"runs/{FOLDER}"}
        told = {name: job_variables.get(name, "") for name in _SHOWN} | environment
        assignments = " ".join(f"{name}={shlex.quote(text)}" for name, text in told.items() if text)
        lines += (
            f"{cell.label} {repeat}/{cell.repeats}: {cell.why}; {_dtype(cell)}, patches: "
            f"{', '.join(options.fused) or 'none'}; {timed} timed iterations of {iterations} "
            f"(≈{cell.expected_seconds:.0f} s)",
            f"    {assignments} make {cell.job.target}",
        )
    total = CEILINGS_SECONDS + sum(cell.expected_seconds for _, cell in kept)
    lines.append(
        f"Expected: {total:.0f} s of {budget:.0f} s, if a start takes {START_SECONDS:.0f} s and an "
        f"iteration {MARK_MS:.0f} ms; what fits is decided by what the runs really take."
    )
    if left_out:
        names = ", ".join(f"{cell.label} {repeat}/{cell.repeats}" for repeat, cell in left_out)
        lines.append(f"Would not fit, for the next call (it resumes where this one ends): {names}")
    return "\n".join(lines)


def fitting(runs: Sequence[Run], seconds: float) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Return the runs that fit into so many seconds one after another, and the runs that do not."""
    kept, left_out = list[Run](), list[Run]()
    for run in runs:
        if run[1].expected_seconds <= seconds:
            kept.append(run)
            seconds -= run[1].expected_seconds
        else:
            left_out.append(run)
    return tuple(kept), tuple(left_out)


def _dtype(cell: Cell) -> str:
    return "bf16" if Flags(cell.job.options.extra).has("--bf16") else cell.job.model.dtype


def _ceilings(console: Console) -> Ceilings | None:
    """Return the measured ceilings of the device, or None if they could not be measured."""
    try:
        figures = microbenchmark.run_workload(
            CEILINGS, DeviceKind.GPU, 1, timeout_seconds=3 * CEILINGS_SECONDS
        )
    except LaunchError as error:
        text = f"The device's ceilings are not known: {error}"
        console.print(text, style="red", markup=False)
        return None
    if figures is None or not (figures.matmul_flops and figures.copy_bytes_per_second):
        return None
    return Ceilings(figures.matmul_flops, figures.copy_bytes_per_second)


def finish(study: Study) -> int:
    """Print the table of all settings measured here, and why a setting of this call is missing."""
    runs = study.experiment.options.runs.parent
    bench = read_bench(runs.parent) or Bench(())
    reasons = dict(study.planned.skipped)
    for result in study.results:
        reasons[result.cell] = result.failure or ("" if result.runs else NO_TIME)
    before, rows = {row.name: row for row in bench.rows}, []
    for cell in (
        study.experiment.cells
    ):  # Settings of this experiment come first, in its order, before those of other calls.
        new = BenchRow(cell.label, _dtype(cell), cell.job.options.fused)
        row = before.pop(cell.label, new)
        rows.append(replace(row, note=row.note or ("" if row.entry else reasons[cell])))
    bench = replace(bench, rows=(*rows, *before.values()))
    study.console.print(bench_text(bench), markup=False, highlight=False)
    again = f"'.venv/bin/python -m tests.bench.gpu_runs {runs.parent}' shows this again."
    study.console.print(f"Results: {runs}; {again}", highlight=False)
    labels = {cell.label for cell in study.planned.launches}
    noted = any(row.note not in ("", NO_TIME) for row in bench.rows if row.name in labels)
    return int(bool(noted or study.planned.skipped))


OUTPUT = Output(finish)
