"""`make bench-auto`: the planner's times and choice on this machine, beside what is measured."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools.launch.auto import as_options, plan_here
from tools.launch.options import Options
from tools.plan.search import Candidate, Plan
from tools.report.analyse.report import rows_of
from tools.spec import settings
from tools.spec.files import ROOT
from tools.study.cells import check_cells, plan_cells
from tools.study.definition import Experiment, ExperimentCell, VariableValue, load_sweep
from tools.study.runner import Runner
from tools.study.tables.auto import AutoGroup, AutoRow, render
from tools.text.terminal import say

NAME = "auto"
BEST = 4
"""Of the planner's ranking, that are trained; and the best of each dimension alone."""
DIMENSIONS = ("dp", "tp", "cp", "pp", "ep")


def bench_auto(
    models: str | None,
    devices: str | None,
    options: Options,
    console: Console,
    reports: Path = ROOT / "reports",
) -> int:
    """Measure, plan and train for each model and number of ranks; 0 if every run ended well.

    Raises:
        LaunchError: A model or number of devices is not known, or cannot be trained here.
    """
    experiment = load_sweep(NAME, {"MODELS": models or "", "DEVICES": devices or ""})
    options = replace(experiment.settings(options), calibrate=True)
    groups: list[AutoGroup] = []
    try:
        for cell in experiment.cells:
            say(console, f"{cell.model} on {cell.devices} {cell.device} rank(s)")
            groups.append(_group(experiment, cell, options, console))
    finally:  # Also after Ctrl-C: what there is is shown.
        if groups and not options.dry_run:
            folder = reports / "bench-auto"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "comparison.md").write_text(render(groups) + "\n")
            say(console, render(groups))
    return int(not all(group.all_well for group in groups))


def chosen_candidates(plan: Plan) -> tuple[Candidate, ...]:
    """Those that are trained: the best of the ranking, and the best of each dimension alone."""
    devices = plan.request.cluster.devices
    names = {f"{word}{devices}" for word in DIMENSIONS}
    return tuple(
        candidate
        for place, candidate in enumerate(plan.ranked)
        if place < BEST or candidate.strategy in names
    )


def _group(
    experiment: Experiment, cell: ExperimentCell, options: Options, console: Console
) -> AutoGroup:
    plan = plan_here(cell.job.under(options), console)
    candidates = chosen_candidates(plan)
    cells = tuple(cell_of(cell, candidate, options) for candidate in candidates)
    group = replace(experiment, cells=cells, skips_illegal=True)
    planned = check_cells(plan_cells(group, options, console), group, options)
    for skipped in planned.skipped:
        say(console, f"skipped: {skipped.cell.name}: {skipped.rule}")
    if options.dry_run:
        return AutoGroup(cell.model, cell.devices, ())
    runner = Runner(planned.launches, options, console, takes_finished=False)
    runner.warm = experiment.warm
    runner.train()
    results = runner.results()
    found = rows_of([result.folders for result in results])
    by_cell = dict(zip(cells, candidates, strict=True))
    rows = tuple(
        AutoRow(
            result.cell.strategy,
            by_cell[result.cell].spec.batch.micro_batch_size,
            1e3 * by_cell[result.cell].seconds.total,
            row.estimate if row else None,
        )
        for result, row in zip(results, found, strict=True)
    )
    return AutoGroup(cell.model, cell.devices, rows)


def cell_of(cell: ExperimentCell, candidate: Candidate, options: Options) -> ExperimentCell:
    """What trains a planned layout."""
    batch, own = candidate.spec.batch, as_options(candidate, options)
    given: list[tuple[str, VariableValue]] = [
        (settings.MICRO_BATCH.name, batch.micro_batch_size),
        (settings.GLOBAL_BATCH.name, batch.global_batch_size),
    ]
    if own.extra:
        given.append((settings.EXTRA.name, shlex.join(own.extra)))
    label = f"{candidate.strategy}, micro batch {batch.micro_batch_size}"
    return replace(cell, strategy=candidate.strategy, label=label, settings=tuple(given))
