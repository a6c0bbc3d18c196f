"""`make train-auto-<model>-<N>cpu|gpu`: choose a strategy for this machine with the planner and train it.

The planner needs constants of the machine, such as the rate of a matrix product. They are measured before
the first plan and stored. They are measured again if the devices or the measuring code change, or if the
user sets CALIBRATE=1. Published measurements that `make report` stored for this machine correct the
predicted times, as they do in `make plan`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parakit.config.batch import choose_samples
from parakit.config.errors import LaunchError
from parakit.config.files import USER_MEASUREMENTS_FILE
from parakit.config.flags import Flags
from parakit.config.hardware import Device, link_by_key
from parakit.config.model import Model
from parakit.config.run import (
    DeviceKind,
    RunSpec,
    adapt_to_cpu_ranks,
    searched_flags,
    spec_from_model,
)
from parakit.config.strategy import Batch, Parallelism, strategy_flags
from parakit.formatting.units import ms
from parakit.launch.calibrate import calibrate, calibration_conditions, find_local_device
from parakit.launch.compose import adapt_model_to_data
from parakit.launch.data import DEFAULT_DATA
from parakit.launch.flags import runtime_flags
from parakit.launch.job import Job, parse_target
from parakit.launch.options import Options
from parakit.launch.runtime import choose_runtime
from parakit.launch.train import start_job
from parakit.planner import (
    Calibration,
    Candidate,
    Cluster,
    Execution,
    Plan,
    Request,
    advice_sentences,
    estimate_uncertainty,
    load_device_calibration,
    load_own_runs,
    no_fit_sentence,
    parse_execution,
    parse_expert_tensor,
    search_configurations,
)


def train_auto(target: str, options: Options, console: Console) -> int:
    """Choose a strategy with the planner, print the reasons, and train it; return the exit code.

    Raises:
        LaunchError: The target is not in the grammar, this machine lacks the devices, or no strategy fits.
    """
    baseline = parse_target(f"train-baseline-{target.removeprefix('train-auto-')}", options)
    plan = plan_for_machine(baseline, console, USER_MEASUREMENTS_FILE)
    print_explanation(plan, console)
    chosen = plan.winner
    if chosen is None:
        raise LaunchError(f"There is no plan for '{target}'; see the sentences above.")
    flags = strategy_flags(chosen.spec.flagged_parallelism)
    job = replace(baseline, strategy=chosen.strategy, script_flags=flags)
    return start_job(job.with_options(options_for_candidate(chosen, options)), console)


def plan_for_machine(job: Job, console: Console, measurements_file: Path | None = None) -> Plan:
    """Return the planner's ranking of strategies for a job on this machine's devices.

    Constants that were measured on this machine are used, and are measured now if they are missing.

    Args:
        job: The model, the number of devices and the options count; the strategy is ignored.
        console: The terminal on which the measurement is announced.
        measurements_file: The user's own published measurements, which correct all predicted times;
            None applies no correction.

    Raises:
        LaunchError: This machine lacks the devices, or the planner does not know them.
        MeasurementsError: `measurements_file` is not a table of measurements.
    """
    device = _find_device(job)
    request = build_request(job, device, _measure_or_read_calibration(job, device, console))
    return search_configurations(
        replace(request, own_runs=load_own_runs(measurements_file, request.cluster))
    )


def build_request(job: Job, device: Device, calibration: Calibration) -> Request:
    """Return the planner's request: the job's model, this machine's devices and the batch of the options."""
    options = job.options
    # The data set decides the vocabulary that is trained, and so the model's size.
    model = adapt_model_to_data(job.model, (), options.data or DEFAULT_DATA[job.device])
    samples = options.global_batch_size or choose_samples(model, job.devices)
    template = _build_template(model, samples, options)
    execution, cores = Execution(), None
    if job.device is DeviceKind.CPU:
        template = adapt_to_cpu_ranks(template)
        cores = len(os.sched_getaffinity(0))
    else:
        runtime = choose_runtime(options, job.device)
        template = replace(template, fused=options.fused, fused_norms=runtime.transformer_engine)
        flags = runtime_flags(job.device, Parallelism(), runtime, options, model)
        execution = parse_execution(Flags((*flags, *options.extra)))
        # The launcher groups the experts' matrix products where it can, and `make plan` assumes this too.
        execution = replace(execution, grouped_experts=True)
    link = link_by_key(device.link)
    cluster = Cluster(device, job.devices, job.devices, link, link, calibration, execution, cores)
    return Request(model, cluster, samples, template)


def _build_template(model: Model, samples: int, options: Options) -> RunSpec:
    """Return a run on one rank with the properties that all candidates of the search share."""
    expert_tensor = parse_expert_tensor(Flags((*model.flags, *options.extra)), model)
    template = spec_from_model(model, Parallelism(expert_tensor=expert_tensor), Batch(1, samples))
    if options.dropout is not None:
        template = replace(template, dropout=options.dropout)
    return template


def print_explanation(plan: Plan, console: Console) -> None:
    """Print the planner's advice, the five fastest strategies, and the source of its constants."""
    if plan.winner is None:
        console.print(no_fit_sentence(plan), highlight=False)
    else:
        request = plan.request
        uncertainty = estimate_uncertainty(plan.winner.spec, request.cluster, request.own_runs)
        for sentence in advice_sentences(plan, uncertainty):
            console.print(sentence, highlight=False)
    ranking = ", ".join(
        f"{candidate.strategy} {ms(candidate.seconds.total)} ms" for candidate in plan.ranked[:5]
    )
    console.print(f"Predicted: {ranking}.", highlight=False)
    source = plan.request.cluster.calibration.source
    console.print(f"Constants: {source}.", highlight=False)


def options_for_candidate(chosen: Candidate, options: Options) -> Options:
    """Return `options` with the batch and flags of a planned candidate, so that exactly this plan is trained."""
    batch, spec = chosen.spec.batch, chosen.spec
    return replace(
        options,
        micro_batch_size=options.micro_batch_size or batch.micro_batch_size,
        global_batch_size=batch.global_batch_size,
        extra=(*searched_flags(spec), *options.extra),
    )


def _find_device(job: Job) -> Device:
    """Return the planner's description of a rank's device; the error names two ways to do without the GPUs."""
    other_targets = (
        f"run 'make plan MODEL={job.model.name} GPUS={job.devices} GPU=h200' for a plan without "
        f"them, or 'make train-auto-gpt2-tiny-{job.devices}cpu'"
    )
    named_target = f"'make train-dp{job.devices}-{job.model.name}-{job.devices}gpu'"
    return find_local_device(
        job.device, job.devices, other_targets, f", or name a strategy: {named_target}"
    )


def _measure_or_read_calibration(job: Job, device: Device, console: Console) -> Calibration:
    """Return this machine's constants: the stored ones if they are still valid, else newly measured ones.

    CALIBRATE=1 always measures. A dry run never measures and takes the stored ones, or the defaults.
    """
    options, reason = job.options, ""
    if options.dry_run or not options.calibrate:
        stored = load_device_calibration(options.runs, device)
        if options.dry_run:
            return stored
        if stored.made_with == calibration_conditions(job.device, job.devices):
            return stored
        if stored.made_with:
            reason = f", before with {stored.made_with}"
    return calibrate(options.runs, job.device, job.devices, device, console, reason)
