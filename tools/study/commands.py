"""What make's targets run: an experiment by its name, and what each kind of table makes of its runs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from statistics import mean

from rich.console import Console

from tools.launch.compose import Launch
from tools.launch.job import parse_target
from tools.launch.options import Options
from tools.launch.preflight import LOG_BYTES
from tools.report.analyse.entry import Entry
from tools.spec.errors import LaunchError
from tools.spec.published import MAIN_SOURCE, load_published
from tools.study.definition import SWEEP, Experiment
from tools.study.engine import Output, Study, run_experiment
from tools.study.finished import finished_run
from tools.study.load import AXES, load_experiment, load_sweep
from tools.study.tables import backends, moe, pipelines, sweep, zero
from tools.study.tables import loss_curve as loss_curve_table
from tools.study.verify.command import verify
from tools.study.verify.pairs import PREFIX
from tools.text.terminal import say
from tools.text.units import MIB

SKIPPED_ITERATIONS = 16
"""fp16 lowers its loss scale first; until then no update is made and Adam's state is not there."""

START_SECONDS = 60.0
"""Of one published run, before its first iteration."""

EVALUATION_SHARE = 10 / 50 / 3
"""Ten forward passes, a third of an iteration each, every fifty iterations."""


def run_named(
    name: str,
    options: Options,
    console: Console,
    model: str | None = None,
    given: Namespace | None = None,
) -> int:
    """Run an experiment by the name of its file; its exit code. With TARGET= every cell trains that.

    Raises:
        LaunchError: There is none of this name, it cannot work here, or a run did not end well.
    """
    target = getattr(given, "target", None)
    trained = parse_target(target) if target else None
    return _run(load_experiment(name, options, model, trained), console)


def parity(options: Options, console: Console, verify: bool = False) -> int:
    """The demo's runs as a check: 0 if all ended well and every loss curve is that of baseline.

    With `verify` a strategy whose losses do not agree is verified tensor by tensor.

    Raises:
        LaunchError: It cannot work here.
    """
    demo = load_experiment("demo", options)
    table = "verified parity" if verify else "parity"
    return _run(replace(demo, report="parity", table=table), console)


def sweep_of_axes(given: Namespace, options: Options, console: Console) -> int:
    """The sweep NAME= with the axes that are set; 0 if all is there.

    Raises:
        LaunchError: A word is no model, strategy, backend or number of devices, or no cell is legal.
    """
    axes = {name: getattr(given, name.lower()) or "" for name in AXES}
    return _run(load_sweep(given.name or SWEEP, options, axes), console)


def _run(experiment: Experiment, console: Console) -> int:
    return run_experiment(experiment, output_of(experiment.table), console)


def report_of(study: Study) -> int:
    """The report of all runs; 0 if it was written and all ended well."""
    return study.build_report() or int(not study.all_well)


def parity_of(study: Study, verifies: bool = False) -> int:
    """The report, and a sentence for each strategy whose losses do not agree with baseline's.

    With `verifies` such a strategy is verified tensor by tensor, and the report says where it begins.
    """
    code = report_of(study)
    rows = study.rows
    if verifies and _verified(study, rows):
        code = report_of(study)
    broken = disagreements(rows)
    for sentence in broken:
        say(study.console, sentence, "red")
    if not broken:
        say(study.console, "Parity: every strategy's losses agree with baseline's.")
    return code or int(bool(broken))


def _verified(study: Study, rows: Sequence[Entry]) -> int:
    """Verify every strategy whose losses broke; how many."""
    broken = [row.strategy for row in rows if row.parity.verdict.startswith("broken")]
    for result in study.results:
        job = result.cell.job
        if job.strategy in broken and result.runs:
            plain = replace(
                job.options, iterations=None, micro_batch_size=None, global_batch_size=None
            )
            verify(f"{PREFIX}{job.name}", Namespace(), plain, study.console, also=result.runs[0])
    return len(broken)


def disagreements(rows: Sequence[Entry]) -> list[str]:
    """A sentence for every row whose parity is not `reference` or `held`."""
    return [
        f"Parity of {row.strategy}: {row.parity.verdict or 'not known'} (status {row.status})."
        for row in rows
        if row.parity.verdict not in ("reference", "held")
    ]


def refuse_few_iterations(experiment: Experiment) -> None:
    """Refuse to reproduce what ends before Adam's state exists.

    Raises:
        LaunchError: Too few iterations to say anything about memory or time.
    """
    iterations = experiment.options.iterations
    if iterations is not None and iterations <= SKIPPED_ITERATIONS + 1:
        raise LaunchError(
            f"ITERS={iterations} ends within fp16's skipped iterations ({SKIPPED_ITERATIONS} in "
            f"the published runs), before Adam's state exists; use {2 * SKIPPED_ITERATIONS} or more."
        )


def announce_published(launches: Sequence[Launch]) -> str:
    """What is about to happen: iterations, disk and minutes."""
    runs = launches[0].job.options.runs
    left = [launch for launch in launches if finished_run(launch, runs) is None]
    minutes = sum(map(_published_seconds, left)) / 60
    return (
        f"{len(left)} of the {len(launches)} published runs are to be made, {launches[0].iterations} "
        f"iterations each ({SKIPPED_ITERATIONS} were skipped by fp16 in the published ones): about "
        f"{minutes:.0f} minutes on the published hardware, and up to "
        f"{len(left) * LOG_BYTES / MIB:.0f} MiB in {runs}. No checkpoints are written."
    )


def _begin_published(study: Study) -> None:
    say(study.console, announce_published(list(study.planned.launches.values())))


def published_of(study: Study) -> int:
    """The report, which shows the published figures too, and how many of the runs are there."""
    reported = study.build_report()
    total, well = len(study.results), sum(result.complete for result in study.results)
    say(
        study.console,
        f"{well} of {total} runs ended well; repeat 'make reproduce' for the others."
        if well < total
        else "All six runs ended well.",
    )
    return reported or int(well < total)


def zero_of(study: Study) -> int:
    """The tables of the DeepSpeed report; 0 if every run ended well with the same losses."""
    study.build_report()
    study.write(zero.render(study.model, study.rows))
    return _losses_agree(study)


def backends_of(study: Study) -> int:
    """Every backend that is installed; 0 if every run ended well with the same losses."""
    study.build_report()
    study.write(backends.render(study.model, study.rows, study.experiment.left_out))
    return _losses_agree(study)


def moe_of(study: Study) -> int:
    """Megatron against plain PyTorch on experts; 0 if every run ended well and parity held."""
    study.build_report()
    rows = study.rows
    if not rows:
        return 1
    notes = (*moe.evaluation_notes(study.results[0].launch), *study.experiment.left_out)
    study.write(moe.render(study.model, rows, notes))
    held = all(found.held for found in moe.parities(rows))
    return int(not held or not study.all_well or not all(map(moe.is_well, rows)))


def pipelines_of(study: Study) -> int:
    """Pipelines with flushes and without; 0 if all ended well and those that flush hold the losses."""
    study.build_report()
    rows = study.rows
    study.write(pipelines.render(study.model, rows))
    broken = pipelines.disagreements(rows)
    for sentence in broken:
        say(study.console, sentence, "red")
    return int(bool(broken) or not study.all_well)


def loss_curve_of(study: Study) -> int:
    """One sentence; 0 if the patches stay within the seeds.

    Raises:
        LaunchError: A run did not end well.
    """
    study.refuse_failed()
    found = loss_curve_table.distances([row.losses for row in study.rows])
    say(
        study.console, loss_curve_table.sentence(found, [result.launch for result in study.results])
    )
    return int(not found.within)


def _losses_agree(study: Study) -> int:
    broken = any(row.parity.verdict.startswith("broken") for row in study.rows)
    return int(not study.all_well or broken)


def _published_seconds(launch: Launch) -> float:
    """As the published machine would take; an unpublished strategy takes what baseline does."""
    figures = {figure.strategy: figure for figure in load_published().of(MAIN_SOURCE)}
    figure = figures.get(launch.spec.name, figures["baseline"])
    seconds = mean(figure.iteration_ms) / 1000
    return START_SECONDS + launch.iterations * seconds * (1 + EVALUATION_SHARE)


_OUTPUTS = {
    "report": Output(report_of),
    "parity": Output(parity_of),
    "verified parity": Output(partial(parity_of, verifies=True)),
    "published": Output(published_of, refuse_few_iterations, _begin_published),
    "zero": Output(zero_of),
    "backends": Output(backends_of),
    "moe": Output(moe_of),
    "pipelines": Output(pipelines_of),
    "loss_curve": Output(loss_curve_of),
    SWEEP: sweep.OUTPUT,
}


def output_of(table: str) -> Output:
    """What an experiment's `table:` names: a kind of the kit's own, or a module with an `OUTPUT`."""
    found: Output = _OUTPUTS.get(table) or import_module(table).OUTPUT
    return found
