"""`make train-…`: one job, from its target to the last line on the terminal, wherever it trains."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from packaging.version import Version
from rich.console import Console

from megatron_patches.context import is_known
from parakit.artifacts.run import LOG_FILE, Status, StatusRecord
from parakit.cluster import Nodes, installed_versions, node_folder
from parakit.config import settings, variables
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.config.flag_table import flags_with_role
from parakit.config.flags import Flags, unlisted_flags, values_by_flag
from parakit.config.model import load_model, merge_training_flags
from parakit.config.run import Backend, DeviceKind
from parakit.config.strategy import describe_batch_scaling, parse_strategy
from parakit.costs import explain_vocabulary_change
from parakit.data import (
    EVAL_ITERATIONS_FLAG,
    SPLIT_FLAG,
    DatasetError,
    Split,
    divide_into_parts,
    open_dataset,
    sizes_sentence,
)
from parakit.formatting.units import number, plural
from parakit.launch.backends import adapt_to_backend
from parakit.launch.checkpoints import resume_if_saved
from parakit.launch.compose import Launch, compose_launch
from parakit.launch.data import make_sample
from parakit.launch.devices import visible_gpus
from parakit.launch.execute import execute_launch, run_ranks
from parakit.launch.initial_checkpoint import ensure_initial_checkpoint
from parakit.launch.job import Job, format_make_command, parse_devices, parse_target
from parakit.launch.options import Options
from parakit.launch.preflight import check_launch
from parakit.launch.preflight_gpu import gpu_memory_warning
from parakit.launch.progress import RunProgress
from parakit.launch.rendezvous.coordinator import Coordinator
from parakit.launch.rendezvous.messages import NodeRecord
from parakit.launch.rendezvous.worker import Worker
from parakit.launch.run_folder import hold_run_folder
from parakit.launch.runtime import Runtime, choose_runtime
from parakit.launch.submit import submit_run
from parakit.launch.supervise.exit_status import format_outcome
from parakit.logs import load_folder
from parakit.reporting import estimate_pooled_runs, loss_curve, resumption_sentence

_RATE_SHARE = 0.5
"""Of the learning rate, below which it is said what a run reaches."""

_OF_VERIFY = {
    each.name
    for each in (
        settings.MODEL,
        settings.DATA,
        settings.DTYPE,
        settings.EXTRA,
        settings.MEGATRON_LM,
        settings.PATCH_FILE,
    )
}
"""What a verification must be given as well to train the same."""


def start_target(target: str, options: Options, console: Console) -> int:
    """Train what a target names, with the flags of the strategy's launch script if it has one.

    A script that was edited so that it does more than name flags replaces this process.

    Raises:
        LaunchError: The target is not in the grammar, or the run cannot work here; nothing was written.
    """
    job = parse_target(target, options)
    script_flags = job.read_script_flags()
    if script_flags is not None:
        return start_job(replace(job, script_flags=script_flags), console)
    if job.script is not None:
        arguments = [job.script, job.model.name, job.device_suffix]
        os.execve(ROOT / job.script, arguments, {**os.environ, variables.PYTHON: sys.executable})
    return start_job(job, console)


def run_strategy(given: Namespace, options: Options, console: Console) -> int:
    """Run what a launch script says: a strategy with the Megatron flags that make it up.

    Raises:
        LaunchError: The run cannot work here; nothing was written.
    """
    model, place = load_model(given.of, options.model), parse_devices(given.on)
    return start_job(Job(given.named, model, *place, options, tuple(given.flags)), console)


def run_strategy_arguments(parser: ArgumentParser) -> None:
    """The words of a launch script."""
    parser.add_argument("named", metavar="STRATEGY")
    parser.add_argument("of", metavar="MODEL")
    parser.add_argument("on", metavar="DEVICES", help="such as 2gpu or 2cpu")
    parser.add_argument("flags", nargs="*", help="after --")


def start_job(job: Job, console: Console) -> int:
    """Train a job on this machine, in Slurm's queue, or as one node's share; the exit code.

    Raises:
        LaunchError: The run cannot work here; nothing was written.
    """
    options, launch = job.options, compose_job(job)
    # A split is chosen for the data set that is there.
    if not options.dry_run and make_sample(launch.data, console):
        launch = compose_job(job)
    if options.slurm is not None:
        return submit_run(launch, console)
    with hold_run_folder(options.run_folder, options.nodes):
        if options.run_folder is not None:  # A job's; Slurm may have requeued it.
            launch = resume_if_saved(launch, options.run_folder)
        if options.dry_run:
            return print_dry_run(launch)
        if launch.nodes is None:  # Else each node reports to the others what stops it.
            check_launch(launch)
            ensure_initial_checkpoint(launch, console)
        console.print(f"{job.target}: {describe_launch(launch)}", highlight=False)
        for sentence in (*list_differences(launch), *filter(None, [gpu_memory_warning(launch)])):
            console.print(sentence, style="yellow", highlight=False)
        each = range(1, options.repeats + 1)
        titles = (f"{job.strategy} {one}" if len(each) > 1 else job.strategy for one in each)
        return 0 if all(train_once(launch, console, title) for title in titles) else 1


def print_dry_run(launch: Launch) -> int:
    """Print the command of a launch, whether it trains another model than it names or never reaches its
    learning rate, and flags of it that the kit does not know; 0.

    Nothing is written, and no data are made.

    Raises:
        LaunchError: The run would be refused, after the command was printed.
    """
    print(format_command_line(launch), flush=True)
    sentences = (
        describe_vocabulary_change(launch),
        describe_chosen_split(launch),
        _schedule_of_another_length(launch),
        _unknown(launch),
    )
    for sentence in filter(None, sentences):
        print(f"# {sentence}", flush=True)
    check_launch(launch)
    return 0


def train_once(launch: Launch, console: Console, title: str) -> bool:
    """Train a checked launch on this machine, or this node's share; True if the run ended `ok`."""
    nodes = launch.nodes
    if nodes is not None and nodes.rank > 0:
        return _train_other(launch, nodes, console, title)
    if nodes is None:
        folder, status = execute_launch(launch, launch.job.options.runs, console, title)
    else:
        folder, status = _train_first(launch, nodes, console, title)
    console.print(format_outcome(folder, status), highlight=False)
    if status.status is Status.OK and nodes is None:
        console.print("\n".join(format_result_lines(launch, folder)), highlight=False)
    return status.status is Status.OK


def _train_first(
    launch: Launch, nodes: Nodes, console: Console, title: str
) -> tuple[Path, StatusRecord]:
    """Node 0: wait for the others, train, record the run; its folder and how it ended.

    Each node reports what stops it to the others, so nothing is checked before.

    Raises:
        LaunchError: A node is missing, differs, or cannot run its share; nothing was written.
    """
    with Coordinator(nodes, _node_record(launch, nodes.count)) as coordinator:
        try:
            check_launch(launch)
        except LaunchError as error:
            coordinator.gather()
            coordinator.refuse(f"Node 0: {error}")
        console.print(
            f"{title}: waiting for {plural(nodes.count - 1, 'more node')}", highlight=False
        )
        launch = launch.join_nodes(coordinator.gather())
        try:
            ensure_initial_checkpoint(launch, console)
        except LaunchError as error:
            coordinator.refuse(f"Node 0: {error}")
        return execute_launch(launch, launch.job.options.runs, console, title, coordinator)


def _train_other(launch: Launch, nodes: Nodes, console: Console, title: str) -> bool:
    """Any other node: join node 0's run, train this share; True if it ended well.

    Raises:
        LaunchError: Node 0 was not reached or refuses, or this machine cannot run its share.
    """
    own = _node_record(launch, nodes.count)
    try:
        check_launch(launch)
    except LaunchError as error:
        own = replace(own, problem=str(error))
    console.print(f"{title}: waiting for node 0 at {nodes.address}", highlight=False)
    with Worker(nodes, own) as worker:
        folder, nodes = worker.join()
        mine = node_folder(folder, nodes.rank)
        mine.mkdir(parents=True, exist_ok=True)
        launch = launch.join_nodes(nodes)
        with RunProgress(console, title, launch.iterations) as progress:
            code = run_ranks(launch, mine / LOG_FILE, progress, worker, folder)
    console.print(
        f"node {nodes.rank} ended with {code} → {relative_to_root(folder)}", highlight=False
    )
    return code == 0


def _node_record(launch: Launch, nodes: int) -> NodeRecord:
    """This node, with what must be the same on all."""
    try:
        data = open_dataset(launch.data_path).bin_sha256 or "without a record"
    except DatasetError:
        data = "missing"
    entry = launch.entry
    patch_file = launch.spec.patch_file
    flags = hashlib.sha256("\0".join(launch.flags).encode()).hexdigest()[:12]
    has = {
        "NNODES=": str(nodes),
        "the kit's code": f"{launch.code.kit} (a hash)",
        "Megatron": f"{entry.megatron_version} {entry.megatron_commit or ''}".strip(),
        "torch": installed_versions().get("torch", "none"),
        "flags": f"{flags} (a hash)",
        "data set": data,
        "PATCH_FILE=": patch_file.sha256[:12] if patch_file else "none",
        "its first iteration after": str(
            launch.resume_point.iteration if launch.resume_point else 0
        ),
    }
    if launch.spec.device is DeviceKind.GPU:
        names = [gpu.name for gpu in visible_gpus()[: launch.local_devices]]
        has["GPUs"] = ", ".join(names) or "none"
    return NodeRecord(platform.node(), has)


def format_result_lines(launch: Launch, folder: Path) -> list[str]:
    """The last lines of a run that ended well: the report's figures of it, whether what it trained twice
    agrees, and the next commands."""
    run, job, figures = load_folder(folder), launch.job, []
    if losses := loss_curve(run):
        figures.append(f"Loss {losses[max(losses)]:.6f} in iteration {max(losses)}")
    if time := estimate_pooled_runs([run]):
        tokens = (run.global_batch_size or 0) * (run.seq_length or 0)
        figures.append(f"{number(time.median)} ms/iteration (median of {time.count})")
        figures.append(f"{tokens * 1000 / time.median:,.0f} tokens/s")
    report = format_make_command("report", {"RUNS": job.variables.get(settings.RUNS.name, "")})
    after = f"Next: '{report}' compares it with the other runs there"
    on_cpu_ranks = job.device is DeviceKind.CPU and job.options.backend is Backend.MEGATRON
    # A resumed run is given all of its recorded flags, which is no line to type.
    if on_cpu_ranks and not run.is_baseline and not launch.resume_point:
        given = {name: text for name, text in job.variables.items() if name in _OF_VERIFY}
        after += f"; '{format_make_command(f'verify-{job.name}', given)}' checks every tensor of it"
    found = f"{', '.join(figures)}." if figures else ""
    return [line for line in (found, resumption_sentence(run), f"{after}.") if line]


def compose_job(job: Job, runtime: Runtime | None = None) -> Launch:
    """Compose a job's launch, on the runtime that its options ask for unless one is given.

    Raises:
        LaunchError, StrategyError: Its strategy, its flags and its devices do not fit each other.
    """
    parse_strategy(job.strategy, job.devices)
    return adapt_to_backend(compose_launch(job, runtime or choose_runtime(job.options, job.device)))


def format_command_line(launch: Launch) -> str:
    """The exact command, as a shell would take it from the repository root."""
    given = " ".join(f"{name}={shlex.quote(text)}" for name, text in launch.environment.items())
    return f"{given} {shlex.join(launch.command())}"


def describe_launch(launch: Launch) -> str:
    """One line on what is about to run."""
    spec, batch = launch.spec, launch.spec.batch
    trainer = f"backend {spec.backend}"
    if spec.backend is Backend.MEGATRON:
        version, commit = launch.entry.megatron_version, launch.entry.megatron_commit
        tried = "" if is_known(Version(version), commit) else " (not tried)"
        trainer = f"Megatron {version}{tried}"
    place = f", in {launch.runtime.pair.name}" if launch.runtime.pair else ""
    return (
        f"{launch.iterations} iterations on {plural(launch.devices, f'{spec.device.upper()} rank')}, "
        f"micro batch {batch.micro_batch_size}, global batch {batch.global_batch_size}, "
        f"{spec.dtype}, {trainer}{place}"
    )


def list_differences(launch: Launch) -> tuple[str, ...]:
    """What the run trains otherwise than its model's file says, and what the kit does not know of it, a
    sentence each."""
    spec, own = launch.spec, launch.job.model
    scaling = describe_batch_scaling(own.batch, spec.batch, spec.parallelism)
    schedule = _schedule_of_another_length(launch)
    sentences = (
        describe_vocabulary_change(launch),
        describe_chosen_split(launch),
        scaling,
        schedule,
        _unknown(launch),
    )
    return tuple(filter(None, sentences))


def _unknown(launch: Launch) -> str:
    names = unlisted_flags(launch.flags)
    if not names:
        return ""
    return (
        f"Not known to this kit: {', '.join(names)}; Megatron gets what is given, and no plan or report "
        "counts it."
    )


def _schedule_of_another_length(launch: Launch) -> str:
    """That the learning rate's schedule is over before the run ends; or, where it is the family's, made
    for long runs, that it is in its warm-up then."""
    given = flags_with_role("schedule")
    if given & values_by_flag(launch.job.options.extra).keys():
        return ""
    flags, iterations = Flags(launch.flags), launch.iterations
    decayed = flags.integer("--lr-decay-iters")
    fits = f'EXTRA="--lr-decay-iters {iterations}" fits the schedule to the run.'
    if iterations > decayed:
        return (
            f"The learning rate is at its least after {decayed} of {iterations} iterations; {fits}"
        )
    warm_up = flags.number("--lr-warmup-fraction") * decayed
    rate = flags.number("--lr")
    is_own = given & values_by_flag(launch.job.model.flags).keys()
    if is_own or iterations > _RATE_SHARE * warm_up:
        return ""
    return (
        f"The learning rate reaches {rate * iterations / warm_up:.2g} of its {rate:.2g}: the schedule's "
        f"warm-up takes {warm_up:.0f} iterations, and the run ends after {iterations}; {fits}"
    )


def describe_chosen_split(launch: Launch) -> str:
    """Say which split the kit chose because the model's own one leaves a part of the data set empty or
    too short; empty if the model's own one is used, or the user's."""
    chosen = Flags(launch.flags).text(SPLIT_FLAG)
    models = Flags(merge_training_flags(launch.model, in_half=False)).text(SPLIT_FLAG)
    if chosen == models or Flags((*launch.job.flags, *launch.job.options.extra)).has(SPLIT_FLAG):
        return ""
    parts = divide_into_parts(open_dataset(launch.data_path), chosen)
    without_validation = parts[Split.VALIDATION].weight == 0
    evaluated = f" and {EVAL_ITERATIONS_FLAG} 0" if without_validation else ""
    return (
        f"Data set {launch.data} is too small for {SPLIT_FLAG} {models}; {SPLIT_FLAG} {chosen}{evaluated} is "
        f"used: {sizes_sentence(parts)}."
    )


def describe_vocabulary_change(launch: Launch) -> str:
    """That the kit's data make it another model; empty if they do not."""
    spec, own = launch.spec, launch.job.model
    shape = replace(spec.trained_shape, vocabulary=own.shape.vocabulary)
    vocabulary = launch.model.shape.vocabulary
    return explain_vocabulary_change(shape, vocabulary, spec.parallelism.tensor)
