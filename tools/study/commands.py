"""An experiment from its file to its table: plan, check, train, report, exit code."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from statistics import mean

from rich.console import Console

from tools.launch.compose import Launch
from tools.launch.data import call_module
from tools.launch.job import parse_target
from tools.launch.options import Options
from tools.launch.preflight import LOG_BYTES
from tools.launch.train import command_line
from tools.report.analyse.entry import Entry
from tools.report.analyse.report import rows_of
from tools.spec.errors import LaunchError
from tools.spec.files import ROOT
from tools.spec.published import MAIN_SOURCE, load_published
from tools.study.cells import PlannedCells, check_cells, plan_cells
from tools.study.definition import SWEEP, Experiment, load_experiment
from tools.study.finished import finished_run
from tools.study.runner import CellResult, Runner
from tools.study.sweep import sweep
from tools.study.tables import backends, moe, pipelines, zero
from tools.study.tables import loss_curve as loss_curve_table
from tools.study.verify.command import verify
from tools.study.verify.pairs import PREFIX
from tools.text.terminal import say
from tools.text.units import MIB

COMPARISON_FILE = "comparison.md"
SKIPPED_ITERATIONS = 16
"""fp16 lowers its loss scale first; until then no update is made and Adam's state is not there."""

START_SECONDS = 60.0
"""Of one published run, before its first iteration."""

EVALUATION_SHARE = 10 / 50 / 3
"""Ten forward passes, a third of an iteration each, every fifty iterations."""


@dataclass(frozen=True)
class Ended:
    """An experiment after its last run."""

    experiment: Experiment
    options: Options
    """With the experiment's settings."""
    results: Sequence[CellResult]
    console: Console

    @property
    def model(self) -> str:
        """The first cell's."""
        return self.experiment.cells[0].model

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

    def rows(self) -> list[Entry]:
        """Of each cell that has a run, in order."""
        return list(filter(None, rows_of([result.folders for result in self.results])))

    def write(self, text: str) -> None:
        """`comparison.md` in the report's folder, and on the terminal."""
        folder = ROOT / "reports" / self.experiment.report
        folder.mkdir(parents=True, exist_ok=True)
        (folder / COMPARISON_FILE).write_text(text + "\n")
        say(self.console, text)
        say(self.console, f"Comparison: {(folder / COMPARISON_FILE).relative_to(ROOT)}")


def run_named(name: str, options: Options, console: Console, model: str | None = None) -> int:
    """Run an experiment by the name of its file; its exit code.

    Raises:
        LaunchError: There is none of this name, or it cannot work here; nothing was trained.
    """
    return run_experiment(load_experiment(name, options, model), options, console)


def parity(options: Options, console: Console, verify: bool = False) -> int:
    """The demo's runs as a check: 0 if all ended well and every loss curve is that of baseline.

    With `verify` a strategy whose losses do not agree is verified tensor by tensor.

    Raises:
        LaunchError: It cannot work here.
    """
    demo = load_experiment("demo", options)
    table = "verified parity" if verify else "parity"
    return run_experiment(replace(demo, report="parity", table=table), options, console)


def run_on_target(
    name: str, options: Options, console: Console, given: Namespace | None = None
) -> int:
    """Run an experiment whose cells train TARGET= instead of their own; its exit code.

    Raises:
        LaunchError: It cannot work here, or a run did not end well.
    """
    trained = parse_target(given.target) if given and given.target else None
    return run_experiment(load_experiment(name, options, trained=trained), options, console)


def run_experiment(experiment: Experiment, options: Options, console: Console) -> int:
    """Plan, check, train what is not there, and make the experiment's table; the exit code.

    Raises:
        LaunchError: It cannot work here; nothing was trained.
    """
    if experiment.table == SWEEP:
        return sweep(experiment, options, console)
    options = experiment.settings(options)
    planned = plan_cells(experiment, options, console)
    output = output_of(experiment.table)
    if output.before is not None:
        output.before(planned, options)
    if options.dry_run:
        print("\n".join(command_line(launch) for _, launch in planned.launches), flush=True)
        check_cells(planned, experiment, options)
        return 0
    planned = check_cells(planned, experiment, options)
    if output.announce is not None:
        say(console, output.announce([launch for _, launch in planned.launches], options))
    runner = Runner(planned.launches, options, console, experiment.takes_finished)
    runner.budget_seconds = experiment.budget_seconds
    runner.warm = experiment.warm
    runner.train()
    return output.finish(Ended(experiment, options, runner.results(), console))


def report_of(ended: Ended) -> int:
    """The report of all runs; 0 if it was written and all ended well."""
    return ended.build_report() or int(not ended.all_well)


def parity_of(ended: Ended) -> int:
    """The report, and a sentence for each strategy whose losses do not agree with baseline's."""
    return _parity(ended, verifies=False)


def verified_parity_of(ended: Ended) -> int:
    """The same; such a strategy is verified tensor by tensor, and the report says where it begins."""
    return _parity(ended, verifies=True)


def _parity(ended: Ended, verifies: bool) -> int:
    code = report_of(ended)
    rows = ended.rows()
    if verifies and _verified(ended, rows):
        code = report_of(ended)
    broken = disagreements(rows)
    for sentence in broken:
        say(ended.console, sentence, "red")
    if not broken:
        say(ended.console, "Parity: every strategy's losses agree with baseline's.")
    return code or int(bool(broken))


def _verified(ended: Ended, rows: Sequence[Entry]) -> int:
    """Verify every strategy whose losses broke; how many."""
    broken = [row.strategy for row in rows if row.parity.verdict.startswith("broken")]
    for result in ended.results:
        launch, strategy = result.launch, result.cell.strategy
        if strategy in broken and result.runs:
            name = f"{PREFIX}{strategy}-{launch.model.name}-{launch.devices}{launch.spec.device}"
            plain = replace(
                ended.options, iterations=None, micro_batch_size=None, global_batch_size=None
            )
            verify(name, Namespace(), plain, ended.console, also=result.runs[0])
    return len(broken)


def disagreements(rows: Sequence[Entry]) -> list[str]:
    """A sentence for every row whose parity is not `reference` or `held`."""
    return [
        f"Parity of {row.strategy}: {row.parity.verdict or 'not known'} (status {row.status})."
        for row in rows
        if row.parity.verdict not in ("reference", "held")
    ]


def refuse_few_iterations(_: PlannedCells, options: Options) -> None:
    """Refuse to reproduce what ends before Adam's state exists.

    Raises:
        LaunchError: Too few iterations to say anything about memory or time.
    """
    if options.iterations is not None and options.iterations <= SKIPPED_ITERATIONS + 1:
        raise LaunchError(
            f"ITERS={options.iterations} ends within fp16's skipped iterations ({SKIPPED_ITERATIONS} in "
            f"the published runs), before Adam's state exists; use {2 * SKIPPED_ITERATIONS} or more."
        )


def announce_published(launches: Sequence[Launch], options: Options) -> str:
    """What is about to happen: iterations, disk and minutes."""
    left = [launch for launch in launches if finished_run(launch, options.runs) is None]
    minutes = sum(map(_published_seconds, left)) / 60
    return (
        f"{len(left)} of the {len(launches)} published runs are to be made, {launches[0].iterations} "
        f"iterations each ({SKIPPED_ITERATIONS} were skipped by fp16 in the published ones): about "
        f"{minutes:.0f} minutes on the published hardware, and up to "
        f"{len(left) * LOG_BYTES / MIB:.0f} MiB in {options.runs}. No checkpoints are written."
    )


def published_of(ended: Ended) -> int:
    """The report, which shows the published figures too, and how many of the runs are there."""
    reported = ended.build_report()
    total, well = len(ended.results), sum(result.complete for result in ended.results)
    say(
        ended.console,
        f"{well} of {total} runs ended well; repeat 'make reproduce' for the others."
        if well < total
        else "All six runs ended well.",
    )
    return reported or int(well < total)


def zero_of(ended: Ended) -> int:
    """The tables of the DeepSpeed report; 0 if every run ended well with the same losses."""
    ended.build_report()
    rows = ended.rows()
    ended.write(zero.render(ended.model, rows))
    return _losses_agree(ended, rows)


def backends_of(ended: Ended) -> int:
    """Every backend that is installed; 0 if every run ended well with the same losses."""
    ended.build_report()
    rows = ended.rows()
    ended.write(backends.render(ended.model, rows, ended.experiment.left_out))
    return _losses_agree(ended, rows)


def moe_of(ended: Ended) -> int:
    """Megatron against plain PyTorch on experts; 0 if every run ended well and parity held."""
    ended.build_report()
    rows = ended.rows()
    if not rows:
        return 1
    notes = (*moe.evaluation_notes(ended.results[0].launch), *ended.experiment.left_out)
    ended.write(moe.render(ended.model, rows, notes))
    held = all(found.held for found in moe.parities(rows))
    return int(not held or not ended.all_well or not all(map(moe.is_well, rows)))


def pipelines_of(ended: Ended) -> int:
    """Pipelines with flushes and without; 0 if all ended well and those that flush hold the losses."""
    ended.build_report()
    rows = ended.rows()
    ended.write(pipelines.render(ended.model, rows))
    broken = pipelines.disagreements(rows)
    for sentence in broken:
        say(ended.console, sentence, "red")
    return int(bool(broken) or not ended.all_well)


def loss_curve_of(ended: Ended) -> int:
    """One sentence; 0 if the patches stay within the seeds.

    Raises:
        LaunchError: A run did not end well.
    """
    refuse_failed(ended)
    found = loss_curve_table.distances([row.losses for row in ended.rows()])
    say(
        ended.console, loss_curve_table.sentence(found, [result.launch for result in ended.results])
    )
    return int(not found.within)


def refuse_failed(ended: Ended) -> None:
    """Refuse to compare what did not end well.

    Raises:
        LaunchError: A run did not.
    """
    for result in ended.results:
        if not result.complete:
            names = ", ".join(folder.name for folder in result.failed)
            raise LaunchError(f"{names or result.cell.name} did not end well: {result.failure}")


def _losses_agree(ended: Ended, rows: Sequence[Entry]) -> int:
    broken = any(row.parity.verdict.startswith("broken") for row in rows)
    return int(not ended.all_well or broken)


def _published_seconds(launch: Launch) -> float:
    """As the published machine would take; an unpublished strategy takes what baseline does."""
    figures = {figure.strategy: figure for figure in load_published().of(MAIN_SOURCE)}
    figure = figures.get(launch.spec.name, figures["baseline"])
    seconds = mean(figure.iteration_ms) / 1000
    return START_SECONDS + launch.iterations * seconds * (1 + EVALUATION_SHARE)


@dataclass(frozen=True)
class Output:
    """What an experiment does before and after training."""

    finish: Callable[[Ended], int]
    """Make the tables; the exit code."""
    before: Callable[[PlannedCells, Options], None] | None = None
    """Refuse what no table could be made of."""
    announce: Callable[[Sequence[Launch], Options], str] | None = None


_OUTPUTS = {
    "report": Output(report_of),
    "parity": Output(parity_of),
    "verified parity": Output(verified_parity_of),
    "published": Output(published_of, refuse_few_iterations, announce_published),
    "zero": Output(zero_of),
    "backends": Output(backends_of),
    "moe": Output(moe_of),
    "pipelines": Output(pipelines_of),
    "loss_curve": Output(loss_curve_of),
}


def output_of(table: str) -> Output:
    """What an experiment's `table:` names: a kind of the kit's own, or a module with an `OUTPUT`."""
    found: Output = _OUTPUTS.get(table) or import_module(table).OUTPUT
    return found
