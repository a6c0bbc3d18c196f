"""The engine of studies: plan every cell, check, train what is not there, ask what the runs say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from tools.launch.data import call_module
from tools.launch.train import command_line
from tools.report.analyse.entry import Entry, rows_of
from tools.spec.errors import LaunchError
from tools.spec.files import ROOT
from tools.study.cells import Planned, check_cells, compose_cells, skipped_sentences
from tools.study.definition import Experiment
from tools.study.runner import CellResult, Runner
from tools.text.terminal import say, say_markdown

COMPARISON_FILE = "comparison.md"


@dataclass(frozen=True)
class Study:
    """An experiment whose cells were checked; what came of them, once they were trained."""

    experiment: Experiment
    planned: Planned
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
        return list(filter(None, rows_of([result.folders for result in self.results])))

    @property
    def all_well(self) -> bool:
        """Every run that was wanted is there."""
        return all(result.complete for result in self.results)

    def build_report(self) -> int:
        """`python -m tools.report build` of all runs; its exit code, 1 where there is no run."""
        folders = [str(folder) for result in self.results for folder in result.folders]
        if not folders:
            return 1
        return call_module("tools.report", "build", *folders, "--name", self.experiment.report)

    def write(self, text: str) -> None:
        """`comparison.md` in the report's folder, and on the terminal."""
        path = self.folder / COMPARISON_FILE
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


def _commands(planned: Planned) -> str:
    return "\n".join(map(command_line, planned.launches.values()))


@dataclass(frozen=True)
class Output:
    """What an experiment does before and after training."""

    finish: Callable[[Study], int]
    """Make the tables; the exit code."""
    before: Callable[[Experiment], None] | None = None
    """Refuse what no table could be made of."""
    begin: Callable[[Study], None] | None = None
    """Say what is about to be trained."""
    shown: Callable[[Planned], str] = _commands
    """What DRY_RUN=1 prints."""
    also_interrupted: bool = False
    """Whether Ctrl-C still makes the tables, of what is there."""


def run_experiment(
    experiment: Experiment, output: Output, console: Console, reports: Path = ROOT / "reports"
) -> int:
    """Plan, check, train what is not there, and make the experiment's table; the exit code.

    Raises:
        LaunchError: It cannot work here; nothing was trained.
    """
    if output.before is not None:
        output.before(experiment)
    planned, dry_run = compose_cells(experiment, console), experiment.options.dry_run
    # What refuses as a whole shows its commands first, then why it would.
    if dry_run and not experiment.skips_illegal:
        print(output.shown(planned), flush=True)
    planned = check_cells(planned, experiment)
    if dry_run and experiment.skips_illegal:
        print(output.shown(planned), flush=True)
    if dry_run:
        return 0
    runner = Runner(experiment, planned.launches, console)
    study = Study(experiment, planned, runner, console, reports)
    for text in skipped_sentences(planned.skipped):
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
