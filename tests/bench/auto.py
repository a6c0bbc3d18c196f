"""`make bench NAME=auto`: compare the planner's times and choice with measurements on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

from rich.console import Console

from parakit.experiments.definition import Cell
from parakit.experiments.engine import Output, Study, run_experiment
from parakit.experiments.load import load_sweep
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.terminal import say
from parakit.formatting.units import percent, plural, signed_percent
from parakit.launch.auto import options_for_candidate, plan_for_machine
from parakit.launch.job import Job
from parakit.launch.options import Options
from parakit.planner.search import Candidate, Plan
from parakit.reporting.analyse.entry import build_entries_from_folders
from parakit.reporting.analyse.statistics import Estimate
from parakit.reporting.render.tables import format_time

BEST = 4
"""Number of candidates from the top of the planner's ranking that are trained."""
DIMENSIONS = ("dp", "tp", "cp", "pp", "ep")
TIME_LIMIT, CHOICE_LIMIT = 0.15, 0.05
"""Largest relative error of a time, and largest loss of the choice."""


@dataclass(frozen=True)
class AutoRow:
    """A strategy with its predicted and measured time."""

    model: str
    ranks: int
    name: str
    """The strategy, with its micro batch."""
    predicted_ms: float
    measured: Estimate | None
    """Measured time, None if the run did not succeed."""

    @property
    def measured_ms(self) -> float:
        """Measured time, infinite if the strategy was not measured."""
        return self.measured.median if self.measured else float("inf")

    @property
    def error(self) -> float | None:
        """Relative error of the prediction, positive if predicted too slow."""
        return self.predicted_ms / self.measured_ms - 1 if self.measured else None


Group = Sequence[AutoRow]
"""Strategies of a model on a number of ranks, with the planner's choice first."""


def best_of(group: Group) -> AutoRow | None:
    """Return the fastest measured strategy."""
    best = min(group, key=lambda row: row.measured_ms)
    return best if best.measured else None


def loss_of(group: Group) -> float | None:
    """Return by which fraction the choice takes longer than the fastest strategy."""
    choice, best = group[0], best_of(group)
    return choice.measured_ms / best.measured_ms - 1 if best and choice.measured else None


def bench_auto(models: str | None, devices: str | None, options: Options, console: Console) -> int:
    """Measure and plan for each model and number of ranks, then train. Return 0 if every run succeeded.

    Raises:
        LaunchError: A model or number of devices is not known, or cannot be trained here.
    """
    axes = {"MODELS": models or "", "DEVICES": devices or ""}
    experiment = load_sweep("auto", replace(options, calibrate=True), axes)
    candidates: dict[Cell, Candidate] = {}
    for job in (cell.job for cell in experiment.cells):
        say(console, f"{job.model.name} on {plural(job.devices, f'{job.device} rank')}")
        chosen = chosen_candidates(plan_for_machine(job, console))
        candidates |= {cell_of(job, candidate): candidate for candidate in chosen}
    planned = replace(experiment, cells=tuple(candidates), report="bench-auto")
    output = Output(partial(finish, candidates), finishes_if_interrupted=True)
    return run_experiment(planned, output, console)


def finish(candidates: Mapping[Cell, Candidate], study: Study) -> int:
    """Print the table of trained strategies, also after Ctrl-C. Return 0 if every run succeeded."""
    groups: dict[tuple[str, int], list[AutoRow]] = {}
    entries = build_entries_from_folders([result.folders for result in study.results])
    for result, entry in zip(study.results, entries, strict=True):
        job, candidate = result.cell.job, candidates[result.cell]
        name = f"{job.strategy}, {candidate.spec.batch.micro_batch_size}"
        times = candidate.seconds.total * 1e3, entry.estimate if entry else None
        group_key = job.model.name, job.devices
        groups.setdefault(group_key, []).append(AutoRow(*group_key, name, *times))
    study.write_comparison(render(list(groups.values())))
    return int(not all(row.measured for group in groups.values() for row in group))


def chosen_candidates(plan: Plan) -> tuple[Candidate, ...]:
    """Return the candidates to train: the best of the ranking, and the best of each single dimension."""
    names = {f"{word}{plan.request.cluster.devices}" for word in DIMENSIONS}
    return tuple(
        candidate
        for rank, candidate in enumerate(plan.ranked)
        if rank < BEST or candidate.strategy in names
    )


def cell_of(job: Job, candidate: Candidate) -> Cell:
    """Return the cell that trains a planned strategy."""
    micro_batch = candidate.spec.batch.micro_batch_size
    options = replace(options_for_candidate(candidate, job.options), micro_batch_size=micro_batch)
    label = f"{candidate.strategy}, micro batch {micro_batch}"
    return Cell(
        job.with_strategy(candidate.strategy).with_options(options), label, repeats=options.repeats
    )


def render(groups: Sequence[Group]) -> str:
    """Return Markdown with a line per group, a line per strategy, and totals."""
    rows = tuple(row for group in groups for row in group)
    errors = [abs(row.error) for row in rows if row.error is not None]
    losses = [loss for group in groups if (loss := loss_of(group)) is not None]
    within = sum(error <= TIME_LIMIT for error in errors)
    right = sum(loss <= CHOICE_LIMIT for loss in losses)
    sums = (
        f"Times within {TIME_LIMIT:.0%} of the measured: {within} of {len(errors)}"
        + (f", mean |error| {mean(errors):.1%}" if errors else "")
        + f". Choice within {CHOICE_LIMIT:.0%} of the best measured: {right} of {len(losses)}"
        + (f", mean loss {mean(losses):.1%}, worst {max(losses):.1%}." if losses else ".")
    )
    parts = (
        "# The automatic choice",
        sums,
        markdown_table(Table(_GROUPS, tuple(groups))),
        "## Strategies",
        "The first of each model and number of ranks is the choice. Errors are positive where a "
        "time was predicted too slow.",
        markdown_table(Table(_ROWS, rows)),
    )
    return "\n\n".join(parts)


_GROUPS: tuple[Column[Group], ...] = (
    Column("model", lambda group: group[0].model),
    Column("ranks", lambda group: group[0].ranks),
    Column("chosen, micro batch", lambda group: group[0].name),
    Column("best measured", lambda group: (best := best_of(group)) and best.name),
    Column("lost by the choice", loss_of, percent),
)
_ROWS: tuple[Column[AutoRow], ...] = (
    Column("model", lambda row: row.model),
    Column("ranks", lambda row: row.ranks),
    Column("layout, micro batch", lambda row: row.name),
    Column("predicted, ms", lambda row: row.predicted_ms, "{:.0f}".format),
    Column("measured, ms [95%]", lambda row: row.measured, partial(format_time, shape=".0f")),
    Column("error", lambda row: row.error, partial(signed_percent, decimals=0)),
)
