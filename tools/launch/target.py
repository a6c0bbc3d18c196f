"""`make train-…`: from the target's name to where its variables say that it trains."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace

from rich.console import Console

from tools.launch.data import make_samples
from tools.launch.job import Job, parse_devices, parse_target
from tools.launch.options import Options
from tools.launch.resume import resume_if_saved
from tools.launch.run_folder import only_attempt
from tools.launch.submit import submit
from tools.launch.train import compose_job, train_composed
from tools.spec import variables
from tools.spec.files import ROOT
from tools.spec.model import load_model


def start_target(target: str, options: Options, console: Console) -> int:
    """Run a target: through its launch script where the strategy has one, else directly.

    Raises:
        LaunchError: The target is not in the grammar.
    """
    job = parse_target(target, options)
    if job.script is not None:
        arguments = [job.script, job.model.name, job.place]
        os.execve(ROOT / job.script, arguments, {**os.environ, variables.PYTHON: sys.executable})
    return start(job, console)


def run_strategy(given: Namespace, options: Options, console: Console) -> int:
    """Run what a launch script says: a strategy with the Megatron flags that make it up.

    Raises:
        LaunchError: The run cannot work here; nothing was written.
    """
    model, place = load_model(given.of, options.model), parse_devices(given.on)
    return start(Job(given.named, model, *place, options, tuple(given.flags)), console)


def run_strategy_arguments(parser: ArgumentParser) -> None:
    """The words of a launch script."""
    parser.add_argument("named", metavar="STRATEGY")
    parser.add_argument("of", metavar="MODEL")
    parser.add_argument("on", metavar="DEVICES", help="such as 2gpu or 2cpu")
    parser.add_argument("flags", nargs="*", help="after --")


def start(job: Job, console: Console) -> int:
    """Train a job on this machine, in Slurm's queue, or as one node's share; the exit code.

    Raises:
        LaunchError: The run cannot work here; nothing was written.
    """
    options, launch = job.options, compose_job(job)
    if not options.dry_run:
        make_samples([launch], console)
    if options.slurm is not None:
        return submit(launch, console)
    with only_attempt(options.run_folder, options.nodes):
        if options.run_folder is not None:  # A job's; Slurm may have requeued it.
            launch = resume_if_saved(launch, options.run_folder)
        return train_composed(launch, console)
