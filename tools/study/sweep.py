"""`make sweep`: an experiment over MODELS= × STRATEGIES= × BACKENDS= × DEVICES=, or a file's axes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from tools.launch.job import Job
from tools.launch.options import Options
from tools.spec.errors import LaunchError
from tools.spec.files import ROOT
from tools.study.cells import PlannedCells, check_cells, plan_cells
from tools.study.definition import SWEEP, Experiment, load_sweep
from tools.study.in_slurm import finished_in_slurm, submit_missing
from tools.study.runner import Runner
from tools.study.tables.sweep import CELLS_FILE, swept, write_results
from tools.text.terminal import say

_OF_THE_SWEEP = ("REPEATS", "DRY_RUN", "RUN_FOLDER")
"""Variables that say what the sweep does, not what a cell trains."""
AXES = ("MODELS", "STRATEGIES", "BACKENDS", "DEVICES")


def sweep_of_axes(given: Namespace, options: Options, console: Console) -> int:
    """The sweep NAME= with the axes that are set; 0 if all is there.

    Raises:
        LaunchError: A word is no model, strategy, backend or number of devices, or no cell is legal.
    """
    axes = {name: getattr(given, name.lower()) or "" for name in AXES}
    return sweep(load_sweep(given.name or SWEEP, axes), options, console)


def sweep(
    experiment: Experiment, options: Options, console: Console, reports: Path = ROOT / "reports"
) -> int:
    """Train every legal cell `REPEATS` times; whatever happens, show what there is; 0 if all is there.

    Raises:
        LaunchError: No cell is legal here; nothing was trained.
    """
    options = experiment.settings(options)
    planned = check_cells(plan_cells(experiment, options, console), experiment, options)
    cells = msgspec.json.format(msgspec.json.encode(as_data(planned)), indent=2)
    if options.dry_run:
        print(cells.decode())
        return 0
    for skipped in planned.skipped:
        say(console, f"skipped: {skipped.cell.name}: {skipped.rule}")
    if not planned.launches:
        raise LaunchError("No cell of this sweep can run here; the rules are above.")
    folder = reports / experiment.report
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CELLS_FILE).write_bytes(cells + b"\n")
    runner = Runner(planned.launches, options, console, takes_finished=True, titles_in_full=True)
    runner.warm = experiment.warm
    if options.slurm is not None:
        runner.finished = lambda _, launch: finished_in_slurm(launch, options)
        submit_missing([launch for _, launch in planned.launches], options, console)
    try:
        if options.slurm is None:
            runner.train()
    finally:  # Also after Ctrl-C: what is there is shown, and the next time resumes from it.
        results = runner.results()
        say(console, write_results(folder, swept(results), planned.skipped))
    return int(not all(result.complete for result in results))


def as_data(planned: PlannedCells) -> dict[str, Sequence[dict[str, object]]]:
    """`cells.json`: target and variables of each cell; the skipped ones with their rule.

    A launcher of any kind can take them; a sweep that runs afterwards finds what it made.
    """
    return {
        "cells": [
            {"name": cell.name, "target": launch.job.target, "variables": _variables(launch.job)}
            for cell, launch in planned.launches
        ],
        "skipped": [{"name": one.cell.name, "rule": one.rule} for one in planned.skipped],
    }


def _variables(job: Job) -> dict[str, str]:
    return {name: text for name, text in job.variables.items() if name not in _OF_THE_SWEEP}
