"""`make train-…` from the target's name to the last line on the terminal."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from packaging.version import Version
from rich.console import Console

from megatron_patches.context import is_known
from tools.launch.backends import for_backend
from tools.launch.compose import Launch, compose
from tools.launch.data import make_missing_data
from tools.launch.execute import execute
from tools.launch.job import Job, parse_devices, parse_target
from tools.launch.multi_node import train_first, train_other
from tools.launch.options import Options
from tools.launch.preflight import check
from tools.launch.relaunch import resume_if_saved
from tools.launch.run_folder import only_attempt
from tools.launch.runtime import ON_HOST, Runtime, choose_runtime
from tools.launch.start import ensure_start_checkpoint
from tools.launch.submit import submit
from tools.plan.tensors import vocabulary_sentence
from tools.records.run import Status, StatusRecord
from tools.spec import variables
from tools.spec.files import ROOT
from tools.spec.flags import unknown_flags
from tools.spec.model import load_model
from tools.spec.run import Backend
from tools.spec.strategy import parse_strategy, scaling_sentence


def start_target(target: str, options: Options, console: Console) -> int:
    """Run a target: through its launch script where the strategy has one, else directly.

    Raises:
        LaunchError: The target is not in the grammar.
    """
    job = parse_target(target, options)
    if job.script is not None:
        arguments = [job.script, job.model.name, job.place]
        os.execve(ROOT / job.script, arguments, {**os.environ, variables.PYTHON: sys.executable})
    return train(job, console)


def run_strategy(given: Namespace, options: Options, console: Console) -> int:
    """Run what a launch script says: a strategy with the Megatron flags that make it up.

    Raises:
        LaunchError: The run cannot work here; nothing was written.
    """
    model, place = load_model(given.of, options.model), parse_devices(given.on)
    return train(Job(given.named, model, *place, options, tuple(given.flags)), console)


def run_strategy_arguments(parser: ArgumentParser) -> None:
    """The words of a launch script."""
    parser.add_argument("named", metavar="STRATEGY")
    parser.add_argument("of", metavar="MODEL")
    parser.add_argument("on", metavar="DEVICES", help="such as 2gpu or 2cpu")
    parser.add_argument("flags", nargs="*", help="after --")


def train(job: Job, console: Console) -> int:
    """Compose, check, train; return the exit code.

    Raises:
        LaunchError: The run cannot work here; nothing was written.
    """
    options = job.options
    launch = compose_job(job, ON_HOST if options.slurm else None)
    if not options.dry_run:
        make_missing_data([launch], console)
    if options.slurm is not None:
        return submit(launch, console)
    with only_attempt(options.run_folder, options.nodes):
        if options.run_folder is not None:  # A job's; Slurm may have requeued it.
            launch = resume_if_saved(launch, options.run_folder)
        return dry_run(launch) if options.dry_run else _train(launch, console)


def dry_run(launch: Launch) -> int:
    """Print the command of a launch, whether it trains another model than it names, and flags of it that
    the kit does not know; 0.

    Nothing is written, and no data are made.

    Raises:
        LaunchError: The run would be refused, after the command was printed.
    """
    print(command_line(launch), flush=True)
    for sentence in filter(None, (_other_vocabulary(launch), _unknown(launch))):
        print(f"# {sentence}", flush=True)
    check(launch, data_is_to_come=True)
    return 0


def _train(launch: Launch, console: Console) -> int:
    job, repeats = launch.job, launch.job.options.repeats
    if launch.nodes is None:  # Else each node reports its problems to the others.
        check(launch)
        ensure_start_checkpoint(launch, console)
    console.print(f"{job.target}: {describe(launch)}", highlight=False)
    for sentence in differences(launch):
        console.print(sentence, style="yellow", highlight=False)
    for repeat in range(1, repeats + 1):
        title = job.strategy if repeats == 1 else f"{job.strategy} {repeat}"
        if not train_once(launch, console, title):
            return 1
    return 0


def train_once(launch: Launch, console: Console, title: str) -> bool:
    """Train on this machine, or this node's ranks of a run on several; True if the run ended `ok`."""
    nodes = launch.nodes
    if nodes is not None and nodes.rank > 0:
        folder, code = train_other(launch, nodes, console, title)
        console.print(f"node {nodes.rank} ended with {code} → {_shown(folder)}", highlight=False)
        return code == 0
    if nodes is not None:
        folder, status = train_first(launch, nodes, console, title)
    else:
        options = launch.job.options
        folder, status = execute(launch, options.runs, console, title, folder=options.run_folder)
    console.print(outcome(folder, status), highlight=False)
    return status.status is Status.OK


def compose_job(job: Job, runtime: Runtime | None = None) -> Launch:
    """Compose a job's launch, on the runtime that its options ask for unless one is given.

    Raises:
        LaunchError, StrategyError: Its strategy, its flags and its devices do not fit each other.
    """
    parse_strategy(job.strategy, job.devices)
    return for_backend(compose(job, runtime or choose_runtime(job.options, job.device)))


def command_line(launch: Launch) -> str:
    """The exact command, as a shell would take it from the repository root."""
    settings = " ".join(
        f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()
    )
    return f"{settings} {shlex.join(launch.command())}"


def describe(launch: Launch) -> str:
    """One line on what is about to run."""
    batch = launch.spec.batch
    return (
        f"{launch.iterations} iterations on {launch.devices} {launch.spec.device.upper()} rank(s), "
        f"micro batch {batch.micro_batch_size}, global batch {batch.global_batch_size}, "
        f"{launch.spec.dtype}, {_trainer(launch)}{_place(launch)}"
    )


def differences(launch: Launch) -> tuple[str, ...]:
    """What the run trains otherwise than its model's file says, and what the kit does not know of it, a
    sentence each."""
    spec, own = launch.spec, launch.job.model
    scaling = scaling_sentence(own.batch, spec.batch, spec.parallelism)
    return tuple(filter(None, (_other_vocabulary(launch), scaling, _unknown(launch))))


def _unknown(launch: Launch) -> str:
    names = unknown_flags(launch.flags)
    if not names:
        return ""
    return (
        f"Not known to this kit: {', '.join(names)}; Megatron gets what is given, and no plan or report "
        "counts it."
    )


def _other_vocabulary(launch: Launch) -> str:
    spec, own = launch.spec, launch.job.model
    shape = replace(spec.trained_shape, vocabulary=own.shape.vocabulary)
    vocabulary = launch.model.shape.vocabulary
    return vocabulary_sentence(shape, vocabulary, spec.parallelism.tensor)


def _place(launch: Launch) -> str:
    return f", in {launch.runtime.pair.name}" if launch.runtime.pair else ""


def _trainer(launch: Launch) -> str:
    if launch.spec.backend is Backend.MEGATRON:
        version = launch.entry.megatron_version
        return f"Megatron {version}{'' if is_known(Version(version)) else ' (not tried)'}"
    return f"backend {launch.spec.backend}"


def outcome(folder: Path, status: StatusRecord) -> str:
    """One line on how it ended and where to look."""
    seconds = f"{status.wall_seconds:.0f} s" if status.wall_seconds is not None else "?"
    reason = f": {status.reason}" if status.status is not Status.OK and status.reason else ""
    return f"{status.status} after {seconds}{reason} → {_shown(folder)}"


def _shown(folder: Path) -> Path:
    return folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
