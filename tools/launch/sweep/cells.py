"""The cells of a sweep as data: what each trains, and the rule against those that are not legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from tools.launch.compose import Launch
from tools.launch.errors import LaunchError
from tools.launch.options import Options
from tools.launch.preflight import check, check_composition
from tools.launch.runtime import ON_HOST
from tools.launch.sweep.request import Request
from tools.launch.target import Target
from tools.launch.train import compose_target, flags_of_grammar
from tools.plan.tensors import parameters_total
from tools.spec.model import load_model
from tools.spec.run import Backend, DeviceKind

ITERATIONS = 25
"""Unless ITERS says more: enough for a bootstrapped interval after the lines that do not count."""

_OF_THE_SWEEP = ("REPEATS", "DRY_RUN", "RUN_FOLDER")
"""Variables that say what the sweep does, not what a cell trains."""


@dataclass(frozen=True)
class Cell:
    """One combination."""

    model: str
    strategy: str
    backend: Backend
    devices: int
    device: DeviceKind

    @property
    def target(self) -> Target:
        """The make target that trains it."""
        return Target(self.strategy, self.model, self.devices, self.device)

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"{self.backend} {self.strategy} {self.model} {self.devices}{self.device}"


@dataclass(frozen=True)
class Skipped:
    """A combination that is not trained, and the rule that says so."""

    cell: Cell
    rule: str


@dataclass(frozen=True)
class Plan:
    """What will be trained, smallest model first, and what will not."""

    launches: tuple[tuple[Cell, Launch], ...]
    skipped: tuple[Skipped, ...]


def plan_cells(request: Request, options: Options) -> Plan:
    """Compose and check every combination; nothing is written."""
    launches: list[tuple[Cell, Launch]] = []
    skipped: list[Skipped] = []
    for cell in cells_of(request):
        try:
            launch = compose_cell(cell, options)
            if options.slurm is None:
                check(launch, options.runs)
            else:  # The nodes' own launchers look at the nodes.
                check_composition(launch, options.runs)
        except (LaunchError, ValueError) as error:
            skipped.append(Skipped(cell, " ".join(str(error).split())))
        else:
            launches.append((cell, launch))
    return Plan(tuple(launches), tuple(skipped))


def cells_of(request: Request) -> list[Cell]:
    """Every combination, backends of one model beside one another, small models first."""
    models = sorted(request.models, key=lambda name: parameters_total(load_model(name).shape))
    axes = product(models, request.devices, request.strategies, request.backends)
    return [Cell(model, strategy, backend, *devices) for model, devices, strategy, backend in axes]


def compose_cell(cell: Cell, options: Options) -> Launch:
    """A cell's launch: without dropout unless it is asked for, so that backends can agree.

    Raises:
        LaunchError: Strategy, backend and devices do not fit each other.
    """
    runtime = ON_HOST if options.slurm is not None else None
    return compose_target(
        cell.target, flags_of_grammar(cell.target), cell_options(cell.backend, options), runtime
    )


def cell_options(backend: Backend, options: Options) -> Options:
    """The options under which a cell of this backend is trained."""
    return replace(
        options,
        backend=backend,
        iterations=options.iterations or ITERATIONS,
        dropout=0.0 if options.dropout is None else options.dropout,
    )


def variables(cell: Cell, options: Options) -> dict[str, str]:
    """Make variables under which `make <target>` trains exactly this cell: the caller's, and its own.

    A launcher of any kind can take them; a sweep that runs afterwards finds what it made.
    """
    own = cell_options(cell.backend, options)
    given = {name: value for name, value in options.given if name not in _OF_THE_SWEEP}
    decided = {"BACKEND": own.backend, "ITERS": own.iterations, "DROPOUT": own.dropout}
    return given | {name: str(value) for name, value in decided.items()}


def as_data(plan: Plan, options: Options) -> dict[str, Sequence[dict[str, object]]]:
    """`cells.json`: target and variables of each cell; the skipped ones with their rule."""
    return {
        "cells": [
            {"name": cell.name, "target": cell.target.name, "variables": variables(cell, options)}
            for cell, _ in plan.launches
        ],
        "skipped": [{"name": one.cell.name, "rule": one.rule} for one in plan.skipped],
    }
