"""`make bench-auto`: the planner's times and choice on this machine, beside what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from tools.launch.auto import as_options, plan_here
from tools.launch.job import Job
from tools.launch.options import Options
from tools.plan.search import Candidate, Plan
from tools.report.analyse.entry import rows_of
from tools.spec.files import ROOT
from tools.study.definition import Cell
from tools.study.engine import Output, Study, run_experiment
from tools.study.load import load_sweep
from tools.study.tables.auto import AutoGroup, AutoRow, render
from tools.text.terminal import say
from tools.text.units import plural

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
    """Measure and plan for each model and number of ranks, then train; 0 if every run ended well.

    Raises:
        LaunchError: A model or number of devices is not known, or cannot be trained here.
    """
    axes = {"MODELS": models or "", "DEVICES": devices or ""}
    experiment = load_sweep(NAME, replace(options, calibrate=True), axes)
    candidates: dict[Cell, Candidate] = {}
    for job in (cell.job for cell in experiment.cells):
        say(console, f"{job.model.name} on {plural(job.devices, f'{job.device} rank')}")
        chosen = chosen_candidates(plan_here(job, console))
        candidates |= {cell_of(job, each): each for each in chosen}
    planned = replace(experiment, cells=tuple(candidates), report="bench-auto")
    output = Output(partial(finish, candidates), also_interrupted=True)
    return run_experiment(planned, output, console, reports)


def finish(candidates: Mapping[Cell, Candidate], study: Study) -> int:
    """The table of what was trained, also after Ctrl-C; 0 if every run ended well."""
    rows: dict[tuple[str, int], list[AutoRow]] = {}
    found = rows_of([result.folders for result in study.results])
    for result, row in zip(study.results, found, strict=True):
        job, candidate = result.cell.job, candidates[result.cell]
        rows.setdefault((job.model.name, job.devices), []).append(
            AutoRow(
                job.strategy,
                candidate.spec.batch.micro_batch_size,
                1e3 * candidate.seconds.total,
                row.estimate if row else None,
            )
        )
    groups = [AutoGroup(*place, tuple(each)) for place, each in rows.items()]
    study.write(render(groups))
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


def cell_of(job: Job, candidate: Candidate) -> Cell:
    """What trains a planned strategy."""
    micro_batch = candidate.spec.batch.micro_batch_size
    options = replace(as_options(candidate, job.options), micro_batch_size=micro_batch)
    label = f"{candidate.strategy}, micro batch {micro_batch}"
    return Cell(job.laid(candidate.strategy).under(options), label, repeats=options.repeats)
