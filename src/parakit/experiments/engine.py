"""The engine of studies: plan every cell, check, train what is not there, ask what the runs say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.data import open_dataset
from parakit.experiments.definition import Cell, Experiment
from parakit.experiments.runner import CellResult, Runner
from parakit.formatting.terminal import say, say_markdown
from parakit.formatting.units import plural
from parakit.launch import (
    SAMPLE,
    Launch,
    call_module,
    check_launch,
    choose_runtime,
    compose_job,
    format_command_line,
    make_sample,
)
from parakit.reporting import Entry, build_entries_from_folders


@dataclass(frozen=True)
class PlannedCells:
    """What will be trained, in this order, and the rule by which a cell will not."""

    launches: Mapping[Cell, Launch]
    skipped: Mapping[Cell, str]


@dataclass(frozen=True)
class Study:
    """An experiment whose cells were checked; what came of them, once they were trained."""

    experiment: Experiment
    planned: PlannedCells
    runner: Runner
    console: Console
    reports: Path

    @property
    def model(self) -> str:
        """The first cell's."""
        return self.experiment.cells[0].job.model.name

    @property
    def folder(self) -> Path:
        """Of its report."""
        return self.reports / self.experiment.report

    @cached_property
    def results(self) -> list[CellResult]:
        """One a cell that could work, in order."""
        return self.runner.results()

    @cached_property
    def rows(self) -> list[Entry]:
        """The report's, of each cell that has a run, in order."""
        return list(
            filter(None, build_entries_from_folders([result.folders for result in self.results]))
        )

    @property
    def all_well(self) -> bool:
        """Every run that was wanted is there."""
        return all(result.complete for result in self.results)

    def report(self) -> int:
        """Write the report of all runs by `python -m parakit report`; return 0 if all ended well."""
        folders = [str(folder) for result in self.results for folder in result.folders]
        if not folders:
            return 1
        options = ("--name", self.experiment.report, "--reports", relative_to_root(self.reports))
        return call_module("parakit", "report", *folders, *options) or int(not self.all_well)

    def write(self, text: str) -> None:
        """`comparison.md` in the report's folder, and on the terminal."""
        path = self.folder / "comparison.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        say_markdown(self.console, text)
        say(self.console, f"Comparison: {path.relative_to(self.reports.parent)}")

    def refuse_failed(self) -> None:
        """Refuse to compare what did not end well.

        Raises:
            LaunchError: A run did not.
        """
        for result in self.results:
            if not result.complete:
                names = ", ".join(folder.name for folder in result.failed)
                raise LaunchError(f"{names or result.cell.name} did not end well: {result.failure}")


@dataclass(frozen=True)
class Output:
    """What an experiment does before and after training."""

    finish: Callable[[Study], int]
    """Make the tables; the exit code."""
    before: Callable[[Experiment], None] | None = None
    """Refuse what no table could be made of."""
    begin: Callable[[Study], None] | None = None
    """Say what is about to be trained."""
    shown: Callable[[PlannedCells], str] = lambda planned: "\n".join(
        map(format_command_line, planned.launches.values())
    )
    """What DRY_RUN=1 prints."""
    also_interrupted: bool = False
    """Whether Ctrl-C still makes the tables, of what is there."""


def make_comparison(text: Callable[[Study], str], is_wrong: Callable[[Study], bool]) -> Output:
    """The report of all runs and a page; 0 if all ended well and nothing of it is wrong.

    Args:
        text: The page in Markdown; empty where there is nothing to compare.
        is_wrong: What else fails it.
    """

    def finish(study: Study) -> int:
        study.report()
        if page := text(study):
            study.write(page)
        return int(not page or not study.all_well or is_wrong(study))

    return Output(finish)


def has_broken_losses(study: Study) -> bool:
    """Whether a run's losses are not the reference's."""
    return any(row.parity.verdict.startswith("broken") for row in study.rows)


def run_experiment(
    experiment: Experiment, output: Output, console: Console, reports: Path = ROOT / "reports"
) -> int:
    """Plan, check, train what is not there, and make the experiment's table; the exit code.

    Raises:
        LaunchError: It cannot work here; nothing was trained.
    """
    if output.before is not None:
        output.before(experiment)
    planned, dry_run = _compose_cells(experiment, console), experiment.options.dry_run
    # What refuses as a whole shows its commands first, then why it would.
    if dry_run and not experiment.file.skips_illegal:
        print(output.shown(planned), flush=True)
    planned = _check_cells(planned, experiment)
    if dry_run and experiment.file.skips_illegal:
        print(output.shown(planned), flush=True)
    if dry_run:
        return 0
    runner = Runner(experiment, planned.launches, console)
    study = Study(experiment, planned, runner, console, reports)
    for text in describe_skipped(planned.skipped):
        say(console, text)
    if output.begin is not None:
        output.begin(study)
    try:
        runner.train()
    except BaseException:
        if output.also_interrupted:
            output.finish(study)
        raise
    return output.finish(study)


def _compose_cells(experiment: Experiment, console: Console) -> PlannedCells:
    """Compose every cell; make missing data."""
    runtime = cache(partial(choose_runtime, experiment.options))

    def compose(cell: Cell) -> Launch:
        launch = compose_job(cell.job, runtime(cell.job.device))
        return replace(launch, environment={**launch.environment, **experiment.file.environment})

    launches, problems = _make_launches(compose, experiment.cells)
    if problems and not experiment.file.skips_illegal:
        raise next(iter(problems.values()))
    if not experiment.options.dry_run:
        for launch in launches.values():
            make_sample(launch.data, console)
        if SAMPLE in {launch.data for launch in launches.values()}:
            data = open_dataset(ROOT / SAMPLE)
            sentence = f"Data: {data.tokens:,} GPT-2 tokens in {data.documents} documents."
            console.print(sentence, highlight=False)
    return PlannedCells(launches, {cell: str(error) for cell, error in problems.items()})


def _check_cells(planned: PlannedCells, experiment: Experiment) -> PlannedCells:
    """What of it can work here; of several nodes (`LAUNCHER=slurm`) each looks at itself."""

    def look_at(cell: Cell) -> Launch:
        check_launch(planned.launches[cell])
        return planned.launches[cell]

    launches, problems = _make_launches(look_at, planned.launches)
    if problems and not experiment.file.skips_illegal:
        # Cells lack the same thing in other words: the number of GPUs, the target instead.
        once: dict[str, str] = {}
        for line in "\n".join(map(str, problems.values())).splitlines():
            once.setdefault(line.partition(";")[0].lstrip("0123456789"), line)
        raise LaunchError("\n".join(filter(None, (*once.values(), experiment.file.instead))))
    said = {**planned.skipped, **{cell: str(error) for cell, error in problems.items()}}
    rules = {cell: " ".join(said[cell].split()) for cell in experiment.cells if cell in said}
    return PlannedCells(launches, rules)


def describe_skipped(skipped: Mapping[Cell, str]) -> list[str]:
    """Skipped cells by the rule that they break, a line for each."""
    cells: dict[str, list[str]] = {}
    for cell, rule in skipped.items():
        cells.setdefault(rule, []).append(cell.name)
    return [
        f"{plural(len(names), 'cell')} skipped ({', '.join(names)}): {rule}"
        for rule, names in cells.items()
    ]


def _make_launches(
    make: Callable[[Cell], Launch], cells: Iterable[Cell]
) -> tuple[dict[Cell, Launch], dict[Cell, ValueError]]:
    """What came of each cell, and why nothing did of the others."""
    launches: dict[Cell, Launch] = {}
    problems: dict[Cell, ValueError] = {}
    for cell in cells:
        try:
            launches[cell] = make(cell)
        except ValueError as error:  # LaunchError is one.
            problems[cell] = error
    return launches, problems
