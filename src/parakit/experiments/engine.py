"""Run an experiment: compose and check every cell, train what is missing, and make the tables.

A *study* is an experiment whose cells were checked. Its output makes the tables from the runs.
"""

from __future__ import annotations

import sys
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
from parakit.formatting.caller import spell_for_caller
from parakit.formatting.terminal import say, say_markdown
from parakit.formatting.units import plural
from parakit.launch import (
    DRY_RUN_REFUSED,
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
    """Launches of the cells that will be trained, in this order, and the cells that cannot be."""

    launches: Mapping[Cell, Launch]
    skipped: Mapping[Cell, str]
    """The rule that each skipped cell breaks, as a sentence."""


@dataclass(frozen=True)
class Study:
    """An experiment whose cells were checked, and their results once they were trained."""

    experiment: Experiment
    planned: PlannedCells
    runner: Runner
    console: Console
    reports: Path

    @property
    def model(self) -> str:
        """Name of the first cell's model."""
        return self.experiment.cells[0].job.model.name

    @property
    def folder(self) -> Path:
        """Folder of the experiment's report."""
        return self.reports / self.experiment.report

    @cached_property
    def results(self) -> list[CellResult]:
        """Results of the cells that could be trained, in order."""
        return self.runner.list_results()

    @cached_property
    def rows(self) -> list[Entry]:
        """The report's rows of the cells that have runs, in order."""
        entries = build_entries_from_folders([result.folders for result in self.results])
        return [entry for entry in entries if entry]

    @property
    def is_complete(self) -> bool:
        """True if every repeat of every cell ended well."""
        return all(result.is_complete for result in self.results)

    def write_report(self) -> int:
        """Write the report of all runs (`python -m parakit report`); return 0 if all ended well.

        The runs of a cell with a label are a row of that name. Without runs nothing is written, and 1 is returned.
        """
        arguments: list[str] = []
        for result in self.results:
            folders = list(map(str, result.folders))
            if result.cell.label and folders:
                arguments.append(f"{result.cell.label}={','.join(folders)}")
            else:
                arguments += folders
        if not arguments:
            return 1
        options = ("--name", self.experiment.report, "--reports", relative_to_root(self.reports))
        code = call_module("parakit", "report", *arguments, *options)
        if code:
            return code
        return 0 if self.is_complete else 1

    def write_comparison(self, text: str) -> None:
        """Write a Markdown text as `comparison.md` into the report's folder, and print it."""
        path = self.folder / "comparison.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        say_markdown(self.console, text)
        say(self.console, f"Comparison: {path.relative_to(self.reports.parent)}")

    def refuse_failed(self) -> None:
        """Refuse to compare runs that did not end well.

        Raises:
            LaunchError: A run did not end well, or is missing.
        """
        for result in self.results:
            if not result.is_complete:
                names = ", ".join(folder.name for folder in result.failed)
                raise LaunchError(f"{names or result.cell.name} did not end well: {result.failure}")


def _format_commands(planned: PlannedCells) -> str:
    """Return the command line of each launch, one per line."""
    return "\n".join(map(format_command_line, planned.launches.values()))


@dataclass(frozen=True)
class Output:
    """Actions of an experiment before and after training."""

    finish: Callable[[Study], int]
    """Make the tables; return the exit code."""
    check: Callable[[Experiment], None] | None = None
    """Refuse an experiment from which no table could be made."""
    announce: Callable[[Study], None] | None = None
    """Say, or write down, what is about to be trained."""
    format_dry_run: Callable[[PlannedCells], str] = _format_commands
    """Return what DRY_RUN=1 prints."""
    finishes_if_interrupted: bool = False
    """Whether Ctrl-C still makes the tables, from the runs that exist."""


def make_comparison(
    render_page: Callable[[Study], str], is_wrong: Callable[[Study], bool]
) -> Output:
    """Return the output that writes the report of all runs and a page that compares them.

    Its exit code is 0 if all runs ended well, there is a page, and `is_wrong` returns False.

    Args:
        render_page: Returns the page in Markdown; empty if there is nothing to compare.
        is_wrong: Returns True if the results are wrong.
    """

    def finish(study: Study) -> int:
        study.write_report()
        page = render_page(study)
        if not page:
            return 1
        study.write_comparison(page)
        return int(not study.is_complete or is_wrong(study))

    return Output(finish)


def has_broken_losses(study: Study) -> bool:
    """Return True if the losses of a run do not agree with the reference's."""
    return any(row.parity.verdict.startswith("broken") for row in study.rows)


def run_experiment(
    experiment: Experiment, output: Output, console: Console, reports: Path = ROOT / "reports"
) -> int:
    """Compose, check and train the cells, and make the experiment's tables; return the exit code.

    DRY_RUN=1 only prints what would be trained.

    Raises:
        LaunchError: The experiment cannot work here; nothing was trained.
    """
    if output.check is not None:
        output.check(experiment)
    planned = _compose_cells(experiment, console)
    if experiment.options.dry_run:
        return _print_dry_run(experiment, output, planned)
    planned = _check_cells(planned, experiment)
    runner = Runner(experiment, planned.launches, console)
    study = Study(experiment, planned, runner, console, reports)
    for sentence in describe_skipped(planned.skipped):
        say(console, sentence)
    if output.announce is not None:
        output.announce(study)
    try:
        runner.train()
    except BaseException:
        if output.finishes_if_interrupted:
            output.finish(study)
        raise
    return output.finish(study)


def _print_dry_run(experiment: Experiment, output: Output, planned: PlannedCells) -> int:
    """Print the commands that would train the experiment; return 0, or 2 if the experiment is refused.

    The reasons of a refusal are printed first, on stderr, because the commands have many lines.

    Raises:
        LaunchError: The experiment skips illegal cells, and no cell can be trained here.
    """
    exit_code = 0
    if experiment.file.skips_illegal:
        planned = _check_cells(planned, experiment)
    else:
        try:
            _check_cells(planned, experiment)
        except LaunchError as error:
            print(spell_for_caller(str(error)), file=sys.stderr, flush=True)
            exit_code = DRY_RUN_REFUSED
    print(output.format_dry_run(planned), flush=True)
    return exit_code


def _compose_cells(experiment: Experiment, console: Console) -> PlannedCells:
    """Return the launch of every cell, and make sample data sets that are missing (not in a dry run).

    Cells that cannot be composed are listed as skipped, with the reason, if the experiment skips such cells.

    Raises:
        LaunchError: A cell cannot be composed, and the experiment does not skip such cells.
    """
    get_runtime = cache(partial(choose_runtime, experiment.options))

    def compose(cell: Cell) -> Launch:
        launch = compose_job(cell.job, get_runtime(cell.job.device))
        return replace(launch, environment={**launch.environment, **experiment.file.environment})

    launches, problems = _make_launches(compose, experiment.cells)
    if problems and not experiment.file.skips_illegal:
        raise next(iter(problems.values()))
    if not experiment.options.dry_run:
        _make_samples(launches.values(), console)
    return PlannedCells(launches, {cell: str(error) for cell, error in problems.items()})


def _make_samples(launches: Iterable[Launch], console: Console) -> None:
    """Make the sample data sets of launches that are missing, and print the size of the usual sample if it is used."""
    data_sets = [launch.data for launch in launches]
    for data in data_sets:
        make_sample(data, console)
    if SAMPLE in data_sets:
        sample = open_dataset(ROOT / SAMPLE)
        sentence = f"Data: {sample.tokens:,} GPT-2 tokens in {sample.documents} documents."
        console.print(sentence, highlight=False)


def _check_cells(planned: PlannedCells, experiment: Experiment) -> PlannedCells:
    """Return the cells that can be trained here, and the skipped ones with the rule that each breaks.

    With `LAUNCHER=slurm` each node checks its own runs.

    Raises:
        LaunchError: A cell cannot be trained, and the experiment does not skip such cells.
    """

    def check(cell: Cell) -> Launch:
        check_launch(planned.launches[cell])
        return planned.launches[cell]

    launches, problems = _make_launches(check, planned.launches)
    if problems and not experiment.file.skips_illegal:
        raise LaunchError(_merge_problems(problems.values(), experiment.file.instead))
    reasons = dict(planned.skipped)
    for cell, error in problems.items():
        reasons[cell] = str(error)
    # The skipped cells are in the order of the experiment, and each rule is in one line.
    rules = {cell: " ".join(reasons[cell].split()) for cell in experiment.cells if cell in reasons}
    return PlannedCells(launches, rules)


def _merge_problems(problems: Iterable[ValueError], instead: str) -> str:
    """Return one line per distinct problem, and a last line that names a target to run instead.

    Problems are the same if their texts up to the first semicolon are equal, apart from a number of GPUs at the
    beginning.
    """
    line_by_problem: dict[str, str] = {}
    for problem in problems:
        for line in str(problem).splitlines():
            problem_text = line.partition(";")[0].lstrip("0123456789")
            line_by_problem.setdefault(problem_text, line)
    lines = list(line_by_problem.values())
    if instead:
        lines.append(instead)
    return "\n".join(line for line in lines if line)


def describe_skipped(skipped: Mapping[Cell, str]) -> list[str]:
    """Return a sentence per rule that cells break. It has the number and the names of these cells."""
    names_by_rule: dict[str, list[str]] = {}
    for cell, rule in skipped.items():
        names_by_rule.setdefault(rule, []).append(cell.name)
    return [
        f"{plural(len(names), 'cell')} skipped ({', '.join(names)}): {rule}"
        for rule, names in names_by_rule.items()
    ]


def _make_launches(
    make: Callable[[Cell], Launch], cells: Iterable[Cell]
) -> tuple[dict[Cell, Launch], dict[Cell, ValueError]]:
    """Return the launches that `make` returns, by cell, and the errors that it raises for other cells."""
    launches: dict[Cell, Launch] = {}
    problems: dict[Cell, ValueError] = {}
    for cell in cells:
        try:
            launches[cell] = make(cell)
        except ValueError as error:  # A LaunchError is a ValueError.
            problems[cell] = error
    return launches, problems
