"""Say what `make reproduce` is about to do, and how many of the six published runs are complete afterwards."""

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
"""Iterations that fp16 skips at first to lower its loss scale: there is no update, and no state of Adam."""

START_SECONDS = 60.0
"""Seconds that a published run takes before its first iteration."""

EVALUATION_FRACTION = 10 / 50 / 3
"""Time of evaluations over that of training: ten forward passes of a third of an iteration, every 50 iterations."""


def refuse_few_iterations(experiment: Experiment) -> None:
    """Refuse to reproduce with so few iterations that Adam has no state yet.

    Raises:
        LaunchError: There are too few iterations to say anything about memory or time.
    """
    iterations = experiment.options.iterations
    if iterations is not None and iterations <= SKIPPED_ITERATIONS + 1:
        raise LaunchError(
            f"ITERS={iterations} ends within fp16's skipped iterations ({SKIPPED_ITERATIONS} in "
            f"the published runs), before Adam's state exists; use {2 * SKIPPED_ITERATIONS} or more."
        )


def announce_published(launches: Sequence[Launch]) -> str:
    """Return what is about to happen: runs to make, iterations, minutes and disk.

    Minutes are counted on the published hardware. A strategy without a published run counts as baseline.
    """
    figures = {figure.strategy: figure for figure in load_published().figures_of(MAIN_SOURCE)}
    runs = launches[0].job.options.runs
    missing = [launch for launch in launches if not find_finished_runs(launch)]
    minutes = 0.0
    for launch in missing:
        figure = figures.get(launch.spec.name, figures["baseline"])
        seconds = launch.iterations * mean(figure.iteration_ms) / 1000
        minutes += (START_SECONDS + seconds * (1 + EVALUATION_FRACTION)) / 60
    return (
        f"{len(missing)} of the {len(launches)} published runs are to be made, {launches[0].iterations} "
        f"iterations each ({SKIPPED_ITERATIONS} were skipped by fp16 in the published ones): about "
        f"{minutes:.0f} minutes on the published hardware, and up to "
        f"{len(missing) * LOG_BYTES / MIB:.0f} MiB in {runs}. No checkpoints are written."
    )


def report_published(study: Study) -> int:
    """Write the report of the study's runs and print how many runs are complete.

    The report also shows the published figures.

    Returns:
        The report's exit code.
    """
    code = study.write_report()
    total = len(study.results)
    num_complete = sum(result.is_complete for result in study.results)
    if num_complete < total:
        sentence = (
            f"{num_complete} of {total} runs ended well; repeat 'make reproduce' for the others."
        )
    else:
        sentence = f"All {total} runs ended well."
    say(study.console, sentence)
    return code


OUTPUT = Output(
    report_published,
    check=refuse_few_iterations,
    announce=lambda study: say(
        study.console, announce_published(list(study.planned.launches.values()))
    ),
)
