"""`make reproduce`: the six published runs in turn on two GPUs, then published beside measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from rich.console import Console

from tools.launch.compose import Launch
from tools.launch.errors import LaunchError
from tools.launch.execute import execute
from tools.launch.finished import finished_run
from tools.launch.options import Options
from tools.launch.preflight import LOG_BYTES, check
from tools.launch.runtime import choose_runtime
from tools.launch.start import ensure_start_checkpoint
from tools.launch.target import Target
from tools.launch.train import command_line, compose_target, flags_of_grammar, outcome
from tools.records import run as records
from tools.records.run import Status
from tools.report.analyse.published import load_published
from tools.spec.files import ROOT
from tools.spec.run import DeviceKind
from tools.spec.strategy import NAMED

MODEL = "gpt2-large"
ITERATIONS = 100
SKIPPED_ITERATIONS = 16
"""fp16 lowers its loss scale first; until then no update is made and Adam's state is not there."""

START_SECONDS = 60.0
"""Of one run, before its first iteration."""

EVALUATION_SHARE = 10 / 50 / 3
"""Ten forward passes, a third of an iteration each, every fifty iterations."""


def reproduce(options: Options, console: Console) -> int:
    """Run what is not there yet, report on all six; 0 if all ended well and the report was written.

    Raises:
        LaunchError: It cannot work here; nothing was written.
    """
    options = replace(options, iterations=options.iterations or ITERATIONS)
    launches = compose_six(options)
    if options.dry_run:
        print("\n".join(map(command_line, launches)))
        return 0
    check_six(launches, options)
    console.print(announcement(launches, options.runs), highlight=False, markup=False)
    folders = [_run(launch, number, options, console) for number, launch in enumerate(launches, 1)]
    made = [folder for folder in folders if folder is not None]
    arguments = (*map(str, made), "--name", "reproduce")
    command = (sys.executable, "-m", "tools.report", "build", *arguments)
    reported = subprocess.run(command, cwd=ROOT, check=False).returncode if made else 1
    well = sum(records.read_status(folder).status is Status.OK for folder in made)
    console.print(
        f"{well} of {len(launches)} runs ended well; repeat 'make reproduce' for the others."
        if well < len(launches)
        else "All six runs ended well.",
        highlight=False,
    )
    return reported or int(well < len(launches))


def compose_six(options: Options) -> list[Launch]:
    """The six published launches.

    Raises:
        LaunchError: Too few iterations to say anything about memory or time.
    """
    if options.iterations is not None and options.iterations <= SKIPPED_ITERATIONS + 1:
        raise LaunchError(
            f"ITERS={options.iterations} ends within fp16's skipped iterations ({SKIPPED_ITERATIONS} in "
            f"the published runs), before Adam's state exists; use {2 * SKIPPED_ITERATIONS} or more."
        )
    runtime = choose_runtime(options, DeviceKind.GPU)
    targets = [
        Target(name, MODEL, 1 if name == "baseline" else 2, DeviceKind.GPU) for name in NAMED
    ]
    return [
        compose_target(target, flags_of_grammar(target), options, runtime) for target in targets
    ]


def check_six(launches: Sequence[Launch], options: Options) -> None:
    """Refuse before anything is written if one of the six cannot run here.

    Raises:
        LaunchError: What is missing, each thing once, and what to run instead.
    """
    problems: dict[str, str] = {}
    for launch in sorted(launches, key=lambda launch: -launch.devices):
        try:
            check(launch, options.runs)
        except LaunchError as error:
            for line in str(error).splitlines():
                # All six lack the same thing in other words: the number of GPUs, the target instead.
                problems.setdefault(line.partition(";")[0].lstrip("0123456789"), line)
    if problems:
        instead = (
            "'make demo' compares the same six strategies on CPU ranks; 'make doctor' shows more."
        )
        raise LaunchError("\n".join((*problems.values(), instead)))


def announcement(launches: Sequence[Launch], runs: Path) -> str:
    """What is about to happen: iterations, disk and minutes."""
    left = [launch for launch in launches if finished_run(launch, runs) is None]
    minutes = sum(map(_seconds, left)) / 60
    return (
        f"{len(left)} of the {len(launches)} published runs are to be made, {launches[0].iterations} "
        f"iterations each ({SKIPPED_ITERATIONS} were skipped by fp16 in the published ones): about "
        f"{minutes:.0f} minutes on the published hardware, and up to "
        f"{len(left) * LOG_BYTES / 2**20:.0f} MiB in {runs}. No checkpoints are written."
    )


def _run(launch: Launch, number: int, options: Options, console: Console) -> Path | None:
    title = f"[{number}/{len(NAMED)}] {launch.spec.name}"
    if (finished := finished_run(launch, options.runs)) is not None:
        console.print(f"{title}: made before → {finished.name}", highlight=False, markup=False)
        return finished
    try:
        ensure_start_checkpoint(launch, options, console)
        folder, status = execute(launch, options.runs, console, title)
    except LaunchError as error:
        console.print(f"{title}: {error}", style="red", highlight=False, markup=False)
        return None
    console.print(f"{title}: {outcome(folder, status)}", highlight=False, markup=False)
    return folder


def _seconds(launch: Launch) -> float:
    """As the published machine would take; an unpublished strategy takes what baseline does."""
    figures = {
        figure.strategy: figure for figure in load_published().figures if figure.model == MODEL
    }
    figure = figures.get(launch.spec.name, figures["baseline"])
    iteration_seconds = mean(figure.iteration_ms) / 1000
    return START_SECONDS + launch.iterations * iteration_seconds * (1 + EVALUATION_SHARE)
