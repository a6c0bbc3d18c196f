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
from parakit.config.batch import describe_batch_choice
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.config.flag_table import flags_with_role
from parakit.config.flags import Flags, unlisted_flags, values_by_flag
from parakit.config.model import load_model, merge_training_flags
from parakit.config.run import Backend, DeviceKind
from parakit.config.strategy import parse_strategy
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
from parakit.formatting.caller import spell_for_caller
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
from parakit.launch.requeue import requeue_announced_end
from parakit.launch.run_folder import hold_run_folder
from parakit.launch.runtime import Runtime, choose_runtime
from parakit.launch.submit import submit_run
from parakit.launch.supervise.exit_status import format_outcome
from parakit.launch.supervise.interruption import Interrupted
from parakit.logs import Run, load_folder
from parakit.reporting import estimate_pooled_runs, loss_curve, resumption_sentence

DRY_RUN_REFUSED = 2
"""Exit code of a dry run that prints why the run would be refused."""
_WARM_UP_FRACTION = 0.5
"""Fraction of the learning rate's warm-up; a run that ends before it is told which rate it reaches."""

_VERIFY_VARIABLES = {
    setting.name
    for setting in (
        settings.MODEL,
        settings.DATA,
        settings.DTYPE,
        settings.EXTRA,
        settings.MEGATRON_LM,
        settings.PATCH_FILE,
    )
}
"""Variables that a verification must also get in order to train the same."""


def start_target(target: str, options: Options, console: Console) -> int:
    """Train the run that a target names, with the flags of the strategy's launch script; return the exit code.

    A script that was edited, so that it does more than name flags, replaces this process.

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


def run_strategy(variables: Namespace, options: Options, console: Console) -> int:
    """Train the strategy, model and Megatron flags that a launch script names; return the exit code.

    Raises:
        LaunchError: The run cannot work here; nothing was written.
    """
    model = load_model(variables.of, options.model)
    devices, device = parse_devices(variables.on)
    return start_job(
        Job(variables.named, model, devices, device, options, tuple(variables.flags)), console
    )


def run_strategy_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that a launch script passes to a parser."""
    parser.add_argument("named", metavar="STRATEGY")
    parser.add_argument("of", metavar="MODEL")
    parser.add_argument("on", metavar="DEVICES", help="such as 2gpu or 2cpu")
    parser.add_argument("flags", nargs="*", help="after --")


def start_job(job: Job, console: Console) -> int:
    """Train a job here, submit it to Slurm, or train it as one of several nodes; return the exit code.

    Raises:
        LaunchError: The run cannot work here; nothing was written.
    """
    options, launch = job.options, compose_job(job)
    # The split depends on the data set's size, so the job is composed anew once the data set exists.
    if not options.dry_run and make_sample(launch.data, console):
        launch = compose_job(job)
    if options.slurm is not None:
        return submit_run(launch, console)
    with hold_run_folder(options.run_folder, options.nodes):
        # A Slurm job has a run folder. After a requeue the folder may hold checkpoints.
        if options.run_folder is not None:
            launch = resume_if_saved(launch, options.run_folder)
        if options.dry_run:
            return print_dry_run(launch)
        # With several nodes, each one reports to the others what stops it.
        if launch.nodes is None:
            check_launch(launch)
            ensure_initial_checkpoint(launch, console)
        console.print(f"{job.target}: {describe_launch(launch)}", highlight=False)
        for sentence in (*list_differences(launch), gpu_memory_warning(launch)):
            if sentence:
                console.print(sentence, style="yellow", highlight=False)
        try:
            return _train_repeats(launch, console)
        except Interrupted as interrupted:
            if options.run_folder is not None:
                signal_number = interrupted.signal_number
                requeue_announced_end(signal_number, launch, options.run_folder, console)
            raise


def _train_repeats(launch: Launch, console: Console) -> int:
    """Train a launch as often as REPEATS= says; return 0, or 1 after the first run that did not end `ok`."""
    strategy, repeats = launch.job.strategy, launch.job.options.repeats
    for repeat in range(1, repeats + 1):
        title = strategy if repeats == 1 else f"{strategy} {repeat}"
        if not train_once(launch, console, title):
            return 1
    return 0


def print_dry_run(launch: Launch) -> int:
    """Print the command of a launch, and what the user should know about the run; return 0, or 2 if it is refused.

    The reasons of a refusal are printed first, on stderr, because a command has many lines. Nothing is written, and
    no data set is made. Sentences after the command tell the user of another model size or split than the target
    names, of a learning rate that is never reached, and of flags that the kit does not know.
    """
    exit_code = 0
    try:
        check_launch(launch)
    except LaunchError as error:
        print(spell_for_caller(str(error)), file=sys.stderr, flush=True)
        exit_code = DRY_RUN_REFUSED
    print(format_command_line(launch), flush=True)
    sentences = (
        describe_vocabulary_change(launch),
        describe_chosen_split(launch),
        _schedule_sentence(launch),
        _unknown_flags_sentence(launch),
    )
    for sentence in filter(None, sentences):
        print(f"# {spell_for_caller(sentence)}", flush=True)
    return exit_code


def train_once(launch: Launch, console: Console, title: str) -> bool:
    """Train a checked launch on this machine, or this node's ranks of it; return True if the run ended `ok`."""
    nodes = launch.nodes
    if nodes is not None and nodes.rank > 0:
        return _train_as_worker(launch, nodes, console, title)
    if nodes is None:
        folder, status = execute_launch(launch, launch.job.options.runs, console, title)
    else:
        folder, status = _train_as_node_0(launch, nodes, console, title)
    console.print(format_outcome(folder, status), highlight=False)
    if status.status is Status.OK and nodes is None:
        console.print("\n".join(format_result_lines(launch, folder)), highlight=False)
    return status.status is Status.OK


def _train_as_node_0(
    launch: Launch, nodes: Nodes, console: Console, title: str
) -> tuple[Path, StatusRecord]:
    """Wait for the other nodes and train with them as node 0; return the run's folder and how the run ended.

    The launch is checked here and not before, so that node 0 can tell the other nodes why it cannot train.

    Raises:
        LaunchError: A node is missing, differs, or cannot train; nothing was written.
    """
    with Coordinator(nodes, _describe_node(launch, nodes.count)) as coordinator:
        try:
            check_launch(launch)
        except LaunchError as error:
            # The other nodes learn the reason only after they have joined. `refuse` raises a LaunchError.
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


def _train_as_worker(launch: Launch, nodes: Nodes, console: Console, title: str) -> bool:
    """Wait for node 0, and train this node's ranks of its run; return True if they ended with exit code 0.

    A problem of this node is sent to node 0, which then refuses the run on all nodes.

    Raises:
        LaunchError: Node 0 is not reached or refuses the run, or this machine cannot train.
    """
    record = _describe_node(launch, nodes.count)
    try:
        check_launch(launch)
    except LaunchError as error:
        record = replace(record, problem=str(error))
    console.print(f"{title}: waiting for node 0 at {nodes.address}", highlight=False)
    with Worker(nodes, record) as worker:
        folder, nodes = worker.join()
        folder_of_node = node_folder(folder, nodes.rank)
        folder_of_node.mkdir(parents=True, exist_ok=True)
        launch = launch.join_nodes(nodes)
        with RunProgress(console, title, launch.iterations) as progress:
            code = run_ranks(launch, folder_of_node / LOG_FILE, progress, worker, folder)
    console.print(
        f"node {nodes.rank} ended with {code} → {relative_to_root(folder)}", highlight=False
    )
    return code == 0


def _describe_node(launch: Launch, nodes: int) -> NodeRecord:
    """Return this node's record with everything that must be the same on all `nodes` nodes."""
    entry = launch.entry
    patch_file, resume_point = launch.spec.patch_file, launch.resume_point
    flags_hash = hashlib.sha256("\0".join(launch.flags).encode()).hexdigest()[:12]
    properties = {
        "NNODES=": str(nodes),
        "the kit's code": f"{launch.code.kit} (a hash)",
        "Megatron": f"{entry.megatron_version} {entry.megatron_commit or ''}".strip(),
        "torch": installed_versions().get("torch", "none"),
        "flags": f"{flags_hash} (a hash)",
        "data set": _hash_datasets(launch),
        "PATCH_FILE=": patch_file.sha256[:12] if patch_file else "none",
        "its first iteration after": str(resume_point.iteration) if resume_point else "0",
    }
    if launch.spec.device is DeviceKind.GPU:
        names = [gpu.name for gpu in visible_gpus()[: launch.local_devices]]
        properties["GPUs"] = ", ".join(names) or "none"
    return NodeRecord(platform.node(), properties)


def _hash_datasets(launch: Launch) -> str:
    """Return the hashes of the contents of the launch's data sets; `missing` if one cannot be opened."""
    try:
        return " ".join(open_dataset(path).content_sha256 for path in launch.data_paths)
    except DatasetError:
        return "missing"


def format_result_lines(launch: Launch, folder: Path) -> list[str]:
    """Return the last lines of a run that ended well: its figures and the next commands.

    The lines of a resumed run include one that says whether the iterations that were trained twice agree.
    """
    run = load_folder(folder)
    lines = (_summarize_figures(run), resumption_sentence(run), _suggest_next_commands(launch, run))
    return [line for line in lines if line]


def _summarize_figures(run: Run) -> str:
    """Return a sentence with the last loss and the median speed of a run; empty if its log has neither."""
    figures = []
    losses = loss_curve(run)
    if losses:
        last_iteration = max(losses)
        figures.append(f"Loss {losses[last_iteration]:.6f} in iteration {last_iteration}")
    time_ms = estimate_pooled_runs([run])
    if time_ms:
        tokens_per_iteration = (run.global_batch_size or 0) * (run.seq_length or 0)
        tokens_per_second = tokens_per_iteration * 1000 / time_ms.median
        figures.append(f"{number(time_ms.median)} ms/iteration (median of {time_ms.count})")
        figures.append(f"{tokens_per_second:,.0f} tokens/s")
    return f"{', '.join(figures)}." if figures else ""


def _suggest_next_commands(launch: Launch, run: Run) -> str:
    """Return a sentence with the command that reports the run.

    For a run on Megatron's CPU ranks it names the command of its verification too.
    """
    job = launch.job
    report = format_make_command("report", {"RUNS": job.variables.get(settings.RUNS.name, "")})
    sentence = f"Next: '{report}' compares this run with the others there"
    on_cpu_ranks = job.device is DeviceKind.CPU and job.options.backend is Backend.MEGATRON
    # A resumed run has all of its recorded flags in EXTRA=, too many for a command to type.
    if not on_cpu_ranks or run.is_baseline or launch.resume_point:
        return f"{sentence}."
    verify_variables = {
        name: text for name, text in job.variables.items() if name in _VERIFY_VARIABLES
    }
    verify = format_make_command(f"verify-{job.name}", verify_variables)
    return f"{sentence}; '{verify}' compares its tensors with the baseline's."


def compose_job(job: Job, runtime: Runtime | None = None) -> Launch:
    """Return a job's launch, on `runtime` or else on the runtime that its options name.

    Raises:
        LaunchError, StrategyError: Strategy, flags and devices of the job contradict each other.
    """
    parse_strategy(job.strategy, job.devices)
    return adapt_to_backend(compose_launch(job, runtime or choose_runtime(job.options, job.device)))


def format_command_line(launch: Launch) -> str:
    """Return the exact command with its environment, as a shell takes it from the repository root."""
    assignments = " ".join(
        f"{name}={shlex.quote(text)}" for name, text in launch.environment.items()
    )
    return f"{assignments} {shlex.join(launch.command())}"


def describe_launch(launch: Launch) -> str:
    """Return a line on what is about to be trained: iterations, ranks, batch, precision, trainer and image."""
    spec, batch, pair = launch.spec, launch.spec.batch, launch.runtime.pair
    image = f", in {pair.name}" if pair else ""
    return (
        f"{launch.iterations} iterations on {plural(launch.devices, f'{spec.device.upper()} rank')}, "
        f"micro batch {batch.micro_batch_size}, global batch {batch.global_batch_size}, "
        f"{spec.dtype}, {_name_trainer(launch)}{image}"
    )


def _name_trainer(launch: Launch) -> str:
    """Return the name of the backend, or Megatron's version, which is marked if the kit was not tested with it."""
    if launch.spec.backend is not Backend.MEGATRON:
        return f"backend {launch.spec.backend}"
    version, commit = launch.entry.megatron_version, launch.entry.megatron_commit
    tested = "" if is_known(Version(version), commit) else " (untested)"
    return f"Megatron {version}{tested}"


def list_differences(launch: Launch) -> tuple[str, ...]:
    """Return a sentence for each way in which the run differs from its model's file, or is unknown to the kit."""
    spec = launch.spec
    sentences = (
        describe_vocabulary_change(launch),
        describe_chosen_split(launch),
        describe_batch_choice(launch.job.model, spec.batch, spec.parallelism, spec.device),
        _schedule_sentence(launch),
        _unknown_flags_sentence(launch),
    )
    return tuple(filter(None, sentences))


def _unknown_flags_sentence(launch: Launch) -> str:
    """Return a sentence that names the Megatron flags that the kit does not know; empty if there are none."""
    names = unlisted_flags(launch.flags)
    if not names:
        return ""
    return (
        f"This kit does not know {', '.join(names)}: Megatron gets the flags as they are, and no plan or "
        "report counts them."
    )


def _schedule_sentence(launch: Launch) -> str:
    """Return a sentence if the learning rate's schedule does not fit the number of iterations; else an empty text.

    The schedule may end before the run ends. Or the run may end during the warm-up, which is reported only for the
    schedule of the model's family, because it is made for long runs. A schedule that the user sets gets no sentence.
    """
    schedule_flags = flags_with_role("schedule")
    user_sets_schedule = bool(schedule_flags & values_by_flag(launch.job.options.extra).keys())
    if user_sets_schedule:
        return ""
    flags, iterations = Flags(launch.flags), launch.iterations
    decay_iterations = flags.integer("--lr-decay-iters")
    remedy = f'EXTRA="--lr-decay-iters {iterations}" fits the schedule to the run.'
    if iterations > decay_iterations:
        return (
            f"The learning rate reaches its minimum after {decay_iterations} of {iterations} iterations; "
            f"{remedy}"
        )
    warm_up_iterations = flags.number("--lr-warmup-fraction") * decay_iterations
    model_sets_schedule = bool(schedule_flags & values_by_flag(launch.job.model.flags).keys())
    if model_sets_schedule or iterations > _WARM_UP_FRACTION * warm_up_iterations:
        return ""
    rate = flags.number("--lr")
    last_rate = rate * iterations / warm_up_iterations
    return (
        f"The learning rate reaches {last_rate:.2g} of its {rate:.2g}: the schedule's warm-up takes "
        f"{warm_up_iterations:.0f} iterations, and the run ends after {iterations}; {remedy}"
    )


def describe_chosen_split(launch: Launch) -> str:
    """Return a sentence on the split that the kit chose; empty if the model's or the user's split is used.

    The kit chooses one if the model's split leaves a part of the data set empty or too short.
    """
    chosen_split = Flags(launch.flags).text(SPLIT_FLAG)
    model_split = Flags(merge_training_flags(launch.model, in_half=False)).text(SPLIT_FLAG)
    user_flags = Flags((*launch.job.flags, *launch.job.options.extra))
    if chosen_split == model_split or user_flags.has(SPLIT_FLAG):
        return ""
    # The split follows from the smallest data set of a blend.
    datasets = {part.prefix: open_dataset(ROOT / part.prefix) for part in launch.data_parts}
    smallest = min(datasets, key=lambda prefix: datasets[prefix].tokens)
    parts = divide_into_parts(datasets[smallest], chosen_split)
    without_validation = parts[Split.VALIDATION].weight == 0
    evaluated = f" and {EVAL_ITERATIONS_FLAG} 0" if without_validation else ""
    return (
        f"Data set {smallest} is too small for {SPLIT_FLAG} {model_split}; {SPLIT_FLAG} {chosen_split}{evaluated} "
        f"is used: {sizes_sentence(parts)}."
    )


def describe_vocabulary_change(launch: Launch) -> str:
    """Return a sentence if the data set's vocabulary changes the size of the model; else empty."""
    spec, model = launch.spec, launch.job.model
    shape = replace(spec.trained_shape, vocabulary=model.shape.vocabulary)
    vocabulary = launch.model.shape.vocabulary
    return explain_vocabulary_change(shape, vocabulary, spec.parallelism.tensor)
