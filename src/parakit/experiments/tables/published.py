"""`make reproduce`: what is said before and after the six published runs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from parakit.config.errors import LaunchError
from parakit.config.published import MAIN_SOURCE, load_published
from parakit.experiments.definition import Experiment
from parakit.experiments.engine import Output, Study
from parakit.experiments.runner import find_finished_runs
from parakit.formatting.terminal import say
from parakit.formatting.units import MIB
from parakit.launch import LOG_BYTES, Launch

SKIPPED_ITERATIONS = 16
"""fp16 lowers its loss scale first; until then no update is made and Adam's state is not there."""

START_SECONDS = 60.0
"""Of one published run, before its first iteration."""

EVALUATION_FRACTION = 10 / 50 / 3
"""Ten forward passes, a third of an iteration each, every fifty iterations."""


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
    """What is about to happen: iterations, disk and minutes.

    As the published machine would take; an unpublished strategy takes what baseline does.
    """
    figures = {figure.strategy: figure for figure in load_published().figures_of(MAIN_SOURCE)}
    runs = launches[0].job.options.runs
    left = [launch for launch in launches if not find_finished_runs(launch)]
    minutes = 0.0
    for launch in left:
        figure = figures.get(launch.spec.name, figures["baseline"])
        seconds = launch.iterations * mean(figure.iteration_ms) / 1000
        minutes += (START_SECONDS + seconds * (1 + EVALUATION_FRACTION)) / 60
    return (
        f"{len(left)} of the {len(launches)} published runs are to be made, {launches[0].iterations} "
        f"iterations each ({SKIPPED_ITERATIONS} were skipped by fp16 in the published ones): about "
        f"{minutes:.0f} minutes on the published hardware, and up to "
        f"{len(left) * LOG_BYTES / MIB:.0f} MiB in {runs}. No checkpoints are written."
    )


def report_published(study: Study) -> int:
    """The report, which shows the published figures too, and how many of the runs are there."""
    code = study.report()
    total, well = len(study.results), sum(result.complete for result in study.results)
    say(
        study.console,
        f"{well} of {total} runs ended well; repeat 'make reproduce' for the others."
        if well < total
        else "All six runs ended well.",
    )
    return code


OUTPUT = Output(
    report_published,
    refuse_few_iterations,
    lambda study: say(study.console, announce_published(list(study.planned.launches.values()))),
)
