"""`make bench-auto`: the planner's times and choice on this machine, beside what is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools.launch.auto import as_options, plan_here
from tools.launch.job import Job
from tools.launch.options import Options
from tools.plan.search import Candidate, Plan
from tools.report.analyse.rows import rows_of
from tools.spec.files import ROOT
from tools.study.cells import check_cells, compose_cells
from tools.study.definition import Cell, Experiment
from tools.study.load import load_sweep
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
    axes = {"MODELS": models or "", "DEVICES": devices or ""}
    experiment = load_sweep(NAME, replace(options, calibrate=True), axes)
    groups: list[AutoGroup] = []
    try:
        for cell in experiment.cells:
            job = cell.job
            say(console, f"{job.model.name} on {job.devices} {job.device} rank(s)")
            groups.append(_group(experiment, job, console))
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


def _group(experiment: Experiment, job: Job, console: Console) -> AutoGroup:
    candidates = {cell_of(job, each): each for each in chosen_candidates(plan_here(job, console))}
    group = replace(experiment, cells=tuple(candidates))
    planned = check_cells(compose_cells(group, console), group)
    for cell, rule in planned.skipped.items():
        say(console, f"skipped: {cell.name}: {rule}")
    if job.options.dry_run:
        return AutoGroup(job.model.name, job.devices, ())
    runner = Runner(group, planned.launches, console)
    runner.train()
    results = runner.results()
    rows = tuple(
        AutoRow(
            result.cell.job.strategy,
            candidates[result.cell].spec.batch.micro_batch_size,
            1e3 * candidates[result.cell].seconds.total,
            row.estimate if row else None,
        )
        for result, row in zip(results, rows_of([r.folders for r in results]), strict=True)
    )
    return AutoGroup(job.model.name, job.devices, rows)


def cell_of(job: Job, candidate: Candidate) -> Cell:
    """What trains a planned strategy."""
    micro_batch = candidate.spec.batch.micro_batch_size
    options = replace(as_options(candidate, job.options), micro_batch_size=micro_batch)
    label = f"{candidate.strategy}, micro batch {micro_batch}"
    return Cell(job.laid(candidate.strategy).under(options), label, repeats=options.repeats)
