"""`make train-auto-<model>-<N>cpu|gpu`: plan for this machine, say what was chosen and why, train it.

With CALIBRATE=1 the planner's constants are measured on this machine first, and kept in a file.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, replace
from pathlib import Path

import psutil
from rich.console import Console

from tools.launch import microbenchmark
from tools.launch.compose import DEFAULT_DATA, model_for
from tools.launch.devices import visible_gpus
from tools.launch.errors import LaunchError
from tools.launch.microbenchmark import Figures, Workload
from tools.launch.options import Options
from tools.launch.target import Target, parse_target
from tools.launch.train import train
from tools.plan.request import load_calibration
from tools.plan.search import Candidate, Plan, Request, search
from tools.plan.time.cluster import Calibration, Cluster
from tools.spec.hardware import (
    Device,
    Link,
    calibration_file,
    device_by_key,
    find_device,
    link_by_key,
)
from tools.spec.model import load_model
from tools.spec.run import DeviceKind, cp_comm_flags, recompute_flags, spec_of_model
from tools.spec.strategy import Batch, Parallelism, batch_for, strategy_flags

TIMEOUT_SECONDS = 600.0
WORKLOADS = {
    DeviceKind.CPU: Workload(
        matmul_size=1024,
        attention_shape=(8, 256, 64),
        copy_bytes=64 << 20,
        layer=True,
        all_reduce_bytes=16 << 20,
        latency=True,
    ),
    DeviceKind.GPU: Workload(
        matmul_size=8192,
        attention_shape=(32, 2048, 128),
        copy_bytes=1 << 30,
        layer=True,
        all_reduce_bytes=16 << 20,
        latency=True,
    ),
}


def train_auto(name: str, options: Options, console: Console) -> int:
    """Plan, explain, train.

    Raises:
        LaunchError: The target is not in the grammar, its devices are not here, or nothing fits.
    """
    target = parse_target(f"train-baseline-{name.removeprefix('train-auto-')}")
    plan = plan_here(target, options, console)
    explain(plan, console)
    chosen = plan.winner
    if chosen is None:
        raise LaunchError(f"There is no plan for '{name}'; see the sentences above.")
    strategy = replace(target, strategy=chosen.strategy)
    flags = strategy_flags(chosen.spec.parallelism)
    return train(strategy, flags, as_options(chosen, target, options), console)


def plan_here(target: Target, options: Options, console: Console) -> Plan:
    """Search on this machine's devices, with its measured constants where there are any.

    Raises:
        LaunchError: The devices are not here, or are none the planner knows.
    """
    device = _device(target)
    calibration = _calibration(target, device, options, console)
    return search(request_here(target, device, calibration, options))


def request_here(
    target: Target, device: Device, calibration: Calibration, options: Options
) -> Request:
    """What the planner is asked: the target's model, this machine, the batch of the options."""
    # As it will be trained: over the vocabulary of the data.
    data = options.data or DEFAULT_DATA[target.device]
    model = model_for(load_model(target.model), (), data)
    on_cpu = target.device is DeviceKind.CPU
    usual = batch_for(model.batch, Parallelism(data=target.devices)).global_batch_size
    samples = options.global_batch_size or usual
    template = spec_of_model(model, Parallelism(), Batch(1, samples))
    if options.dropout is not None:
        template = replace(template, dropout=options.dropout)
    if on_cpu:
        template = replace(template, dtype="fp32", fused_attention=False, device=DeviceKind.CPU)
    link = link_by_key(device.link)
    cluster = Cluster(device, target.devices, target.devices, link, link, calibration)
    return Request(model, cluster, samples, template)


def explain(plan: Plan, console: Console) -> None:
    """The planner's advice, its ranking in one line, and where its constants are from."""
    from tools.plan.advice import advice

    for sentence in advice(plan):
        console.print(sentence, highlight=False)
    ranking = ", ".join(f"{c.strategy} {1e3 * c.seconds.total:.1f} ms" for c in plan.ranked[:5])
    console.print(f"Predicted: {ranking}.", highlight=False)
    source = plan.request.cluster.calibration.source
    console.print(f"Constants: {source}.", highlight=False)


def as_options(chosen: Candidate, target: Target, options: Options) -> Options:
    """The options that make the launcher train exactly what was planned."""
    batch, spec = chosen.spec.batch, chosen.spec
    if target.device is DeviceKind.CPU:
        # CPU ranks gather keys and values whatever --cp-comm-type says.
        spec = replace(spec, cp_comm_type="p2p")
    return replace(
        options,
        micro_batch_size=options.micro_batch_size or batch.micro_batch_size,
        global_batch_size=batch.global_batch_size,
        extra=(*recompute_flags(spec.recompute), *cp_comm_flags(spec), *options.extra),
    )


def _device(target: Target) -> Device:
    if target.device is DeviceKind.CPU:
        nominal = device_by_key("cpu")
        share = psutil.virtual_memory().available // target.devices
        return replace(nominal, memory_bytes=share)
    names = [gpu.name for gpu in visible_gpus()]
    if len(names) < target.devices:
        raise LaunchError(
            f"{target.devices} GPU(s) are wanted and {len(names)} found; run 'make plan "
            f"MODEL={target.model} GPUS={target.devices} GPU=h200' for a plan without them, or "
            f"'make train-auto-gpt2-tiny-{target.devices}cpu'."
        )
    device = find_device(names[0])
    if device is None:
        raise LaunchError(
            f"The planner has no rates of '{names[0]}'; add it to tools/spec/hardware.yaml, or name "
            f"a strategy: 'make train-dp{target.devices}-{target.model}-{target.devices}gpu'."
        )
    return device


def _calibration(target: Target, device: Device, options: Options, console: Console) -> Calibration:
    if options.calibrate:
        console.print(f"Measuring {target.devices} {target.device} rank(s) …", highlight=False)
        link = link_by_key(device.link)
        return calibrate(options.runs, target.device, target.devices, device, link)
    kept = calibration_path(options.runs, device)
    if kept.is_file():
        return load_calibration(kept)
    if target.device is DeviceKind.CPU:
        return Calibration(source="nominal ones of a CPU core; CALIBRATE=1 measures this machine's")
    return Calibration()


def calibration_path(runs: Path, device: Device) -> Path:
    """Where this machine's constants for a device are kept; `make plan GPU=<key>` looks there too."""
    return runs / calibration_file(device.key)


def calibrate(runs: Path, kind: DeviceKind, ranks: int, device: Device, link: Link) -> Calibration:
    """Measure for a few seconds on `ranks` devices at once, keep the result, return it.

    Raises:
        LaunchError: The measurement failed; with the last error of a rank.
    """
    try:
        figures = microbenchmark.measure(
            WORKLOADS[kind], kind, ranks, timeout_seconds=TIMEOUT_SECONDS
        )
    except LaunchError as error:
        raise LaunchError(f"The calibration on {ranks} {kind} rank(s) failed: {error}") from None
    assert figures is not None  # There is one node.
    calibration = from_figures(figures, kind, device, link)
    path = calibration_path(runs, device)
    runs.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(calibration), indent=2) + "\n")
    return calibration


def from_figures(figures: Figures, kind: DeviceKind, device: Device, link: Link) -> Calibration:
    """Shares of the datasheet's (for a CPU: nominal) rates; what was not measured keeps its default."""
    peak_flops = device.peak_flops("fp32" if kind is DeviceKind.CPU else "bf16")
    assert peak_flops is not None
    measured = {
        "matmul": _share(figures.matmul_flops, peak_flops),
        "attention": _share(figures.attention_flops, peak_flops),
        "memory": _share(figures.copy_bytes_per_second, device.memory_bytes_per_second),
        "link": _share(figures.all_reduce_bytes_per_second, link.bytes_per_second),
        "layer_launch_seconds": figures.layer_seconds,
        "link_latency_seconds": figures.all_reduce_latency_seconds,
    }
    known = {name: value for name, value in measured.items() if value is not None}
    calibration = replace(Calibration(source=f"measured on {platform.node()}"), **known)  # type: ignore[arg-type]
    if kind is DeviceKind.GPU:
        return calibration
    # A CPU rank is one core: for what gloo's thread or Python does there, arithmetic waits.
    return replace(calibration, contention=1.0, launch_beside_work=False)


def _share(measured: float | None, nominal: float) -> float | None:
    return None if measured is None else measured / nominal
