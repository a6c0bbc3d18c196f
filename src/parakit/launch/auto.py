"""`make train-auto-<model>-<N>cpu|gpu`: plan for this machine, say what was chosen and why, train it.

The planner's constants are measured on this machine first, and kept until its devices or what measures
them change; CALIBRATE=1 measures them anew. Runs that `make report` kept as one's own measurements
correct its times, as they correct those of `make plan`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.files import USER_MEASUREMENTS_FILE
from parakit.config.flags import Flags
from parakit.config.hardware import Device, link_by_key
from parakit.config.run import DeviceKind, adapt_to_cpu_ranks, searched_flags, spec_from_model
from parakit.config.strategy import Batch, Parallelism, scale_batch, strategy_flags
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
    estimate_uncertainty,
    load_device_calibration,
    load_own_runs,
    parse_execution,
    parse_expert_tensor,
    search_configurations,
)


def train_auto(target: str, options: Options, console: Console) -> int:
    """Plan, explain, train.

    Raises:
        LaunchError: The target is not in the grammar, its devices are not here, or nothing fits.
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


def plan_for_machine(job: Job, console: Console, own: Path | None = None) -> Plan:
    """Search on this machine's devices, with its measured constants where there are any.

    Args:
        job: With any strategy; its model, devices and options count.
        console: Says what is measured.
        own: The file of one's own measurements, which correct every time; None takes none.

    Raises:
        LaunchError: The devices are not here, or are none the planner knows.
        MeasurementsError: `own` is no table.
    """
    device = _device(job)
    request = build_request(job, device, _calibration(job, device, console))
    return search_configurations(replace(request, own_runs=load_own_runs(own, request.cluster)))


def build_request(job: Job, device: Device, calibration: Calibration) -> Request:
    """What the planner is asked: the job's model, this machine, the batch of the options."""
    options = job.options
    # As it will be trained: over the vocabulary of the data.
    model = adapt_model_to_data(job.model, (), options.data or DEFAULT_DATA[job.device])
    on_cpu = job.device is DeviceKind.CPU
    usual = scale_batch(model.batch, Parallelism(data=job.devices)).global_batch_size
    samples = options.global_batch_size or usual
    expert_tensor = parse_expert_tensor(Flags((*model.flags, *options.extra)), model)
    template = spec_from_model(model, Parallelism(expert_tensor=expert_tensor), Batch(1, samples))
    if options.dropout is not None:
        template = replace(template, dropout=options.dropout)
    if on_cpu:
        template = adapt_to_cpu_ranks(template)
    execution = Execution()
    if not on_cpu:
        runtime = choose_runtime(options, job.device)
        template = replace(template, fused=options.fused, fused_norms=runtime.transformer_engine)
        words = runtime_flags(job.device, Parallelism(), runtime, options, model)
        execution = parse_execution(Flags((*words, *options.extra)))
        # As `make plan`: the launcher groups experts where they can be.
        execution = replace(execution, grouped_experts=True)
    link = link_by_key(device.link)
    cores = len(os.sched_getaffinity(0)) if on_cpu else None
    cluster = Cluster(device, job.devices, job.devices, link, link, calibration, execution, cores)
    return Request(model, cluster, samples, template)


def print_explanation(plan: Plan, console: Console) -> None:
    """The planner's advice, its ranking in one line, and where its constants are from."""
    from parakit.planner import advice_sentences

    for sentence in advice_sentences(plan):
        console.print(sentence, highlight=False)
    ranking = ", ".join(f"{c.strategy} {ms(c.seconds.total)} ms" for c in plan.ranked[:5])
    console.print(f"Predicted: {ranking}.", highlight=False)
    if plan.winner is not None:
        request = plan.request
        known = estimate_uncertainty(plan.winner.spec, request.cluster, request.own_runs)
        console.print(str(known), highlight=False)
    source = plan.request.cluster.calibration.source
    console.print(f"Constants: {source}.", highlight=False)


def options_for_candidate(chosen: Candidate, options: Options) -> Options:
    """The options that make the launcher train exactly what was planned."""
    batch, spec = chosen.spec.batch, chosen.spec
    return replace(
        options,
        micro_batch_size=options.micro_batch_size or batch.micro_batch_size,
        global_batch_size=batch.global_batch_size,
        extra=(*searched_flags(spec), *options.extra),
    )


def _device(job: Job) -> Device:
    instead = (
        f"run 'make plan MODEL={job.model.name} GPUS={job.devices} GPU=h200' for a plan without "
        f"them, or 'make train-auto-gpt2-tiny-{job.devices}cpu'"
    )
    named = f"'make train-dp{job.devices}-{job.model.name}-{job.devices}gpu'"
    return find_local_device(job.device, job.devices, instead, f", or name a strategy: {named}")


def _calibration(job: Job, device: Device, console: Console) -> Calibration:
    """Measured on this machine: now where it was not under these conditions, and with CALIBRATE=1; dry
    runs take what there is."""
    options, before = job.options, ""
    if options.dry_run or not options.calibrate:
        kept = load_device_calibration(options.runs, device)
        if options.dry_run or kept.made_with == calibration_conditions(job.device, job.devices):
            return kept
        before = f", before with {kept.made_with}" if kept.made_with else ""
    return calibrate(options.runs, job.device, job.devices, device, console, before)
