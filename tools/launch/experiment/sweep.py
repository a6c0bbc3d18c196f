"""`make sweep`: an experiment whose cells are MODELS= × STRATEGIES= × BACKENDS= × DEVICES=."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec
from rich.console import Console

from tools.launch.errors import LaunchError
from tools.launch.experiment.cells import Planned, cell_options, check_cells, plan_cells
from tools.launch.experiment.definition import Cell, Experiment
from tools.launch.experiment.in_slurm import finished_in_slurm, submit_cells
from tools.launch.experiment.runner import Runner, say
from tools.launch.experiment.tables.sweep import CELLS_FILE, swept, write_results
from tools.launch.options import Options
from tools.launch.target import parse_target
from tools.plan.tensors import parameters_total
from tools.spec.files import ROOT
from tools.spec.model import load_model
from tools.spec.run import Backend, DeviceKind

AXES = {
    "MODELS": "gpt2-tiny gpt3-64m",
    "STRATEGIES": "baseline dp2",
    "BACKENDS": "megatron native",
    "DEVICES": "1cpu 2cpu",
    "NAME": "sweep",
}
"""What a sweep covers unless its variables say otherwise."""

SETTINGS = {"iterations": 25, "dropout": 0.0}
"""Enough for a bootstrapped interval after the lines that do not count; without dropout, so that
backends can agree."""

_OF_THE_SWEEP = ("REPEATS", "DRY_RUN", "RUN_FOLDER")
"""Variables that say what the sweep does, not what a cell trains."""
_DEVICES = re.compile(r"([1-9]\d*)(gpu|cpu)")
_NAME = re.compile(r"\w[\w.-]*")


def sweep_from_environment(environment: Mapping[str, str] = os.environ) -> Experiment:
    """Every combination, backends of one model beside one another, small models first.

    Words may be apart by spaces or commas. The first backend is the one the others are compared with.

    Raises:
        LaunchError: A word is no model, strategy, backend or number of devices; it is named.
    """

    def words(variable: str) -> tuple[str, ...]:
        text = environment.get(variable) or AXES[variable]
        return tuple(dict.fromkeys(text.replace(",", " ").split()))

    def each[T](variable: str, convert: Callable[[str], T], wanted: str) -> tuple[T, ...]:
        found = []
        for word in words(variable):
            try:
                found.append(convert(word))
            except ValueError:
                raise LaunchError(f"{variable}: {word} is not {wanted}.") from None
        return tuple(found)

    models, strategies = words("MODELS"), words("STRATEGIES")
    for model, strategy in product(models, strategies):
        parse_target(f"train-{strategy}-{model}-1cpu")
    backends = each("BACKENDS", Backend, "megatron, native, deepspeed or bare")
    devices = each("DEVICES", _devices, "a number of devices such as 2cpu or 8gpu")
    models = tuple(sorted(models, key=lambda name: parameters_total(load_model(name).shape)))
    return Experiment(
        report=each("NAME", _name, "a folder's name")[0],
        cells=tuple(
            Cell(model, strategy, number, kind, backend)
            for model, (number, kind), strategy, backend in product(
                models, devices, strategies, backends
            )
        ),
        defaults=SETTINGS,
        takes_finished=True,
        skips_illegal=True,
    )


def sweep(
    experiment: Experiment, options: Options, console: Console, reports: Path = ROOT / "reports"
) -> int:
    """Train every legal cell `REPEATS` times; whatever happens, show what there is; 0 if all is there.

    Raises:
        LaunchError: No cell is legal here; nothing was trained.
    """
    options = experiment.settings(options)
    planned = check_cells(plan_cells(experiment, options, console), experiment, options)
    cells = msgspec.json.format(msgspec.json.encode(as_data(planned, options)), indent=2)
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
    if options.slurm is not None:
        runner.finished = lambda _, launch: finished_in_slurm(launch, options)
        submit_cells(
            [(cell, launch, variables(cell, options)) for cell, launch in planned.launches],
            options,
            console,
        )
    try:
        if options.slurm is None:
            runner.train()
    finally:  # Also after Ctrl-C: what is there is shown, and the next time resumes from it.
        results = runner.results()
        say(console, write_results(folder, swept(results), planned.skipped))
    return int(not all(result.complete for result in results))


def variables(cell: Cell, options: Options) -> dict[str, str]:
    """Make variables under which `make <target>` trains exactly this cell: the caller's, and its own.

    A launcher of any kind can take them; a sweep that runs afterwards finds what it made.
    """
    own = cell_options(cell, options)
    given = {name: value for name, value in options.given if name not in _OF_THE_SWEEP}
    decided = {"BACKEND": own.backend, "ITERS": own.iterations, "DROPOUT": own.dropout}
    return given | {name: str(value) for name, value in decided.items()}


def as_data(planned: Planned, options: Options) -> dict[str, Sequence[dict[str, object]]]:
    """`cells.json`: target and variables of each cell; the skipped ones with their rule."""
    return {
        "cells": [
            {"name": cell.name, "target": cell.target.name, "variables": variables(cell, options)}
            for cell, _ in planned.launches
        ],
        "skipped": [{"name": one.cell.name, "rule": one.rule} for one in planned.skipped],
    }


def _devices(text: str) -> tuple[int, DeviceKind]:
    match = _DEVICES.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return int(match[1]), DeviceKind(match[2])


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(text)
    return text
