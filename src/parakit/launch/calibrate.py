"""`make calibrate`: the planner's constants as this machine's devices reach them, in a minute.

They are kept by machine and device in the folder of runs, where `make plan GPU=<device>`,
`make report` and `train-auto-…` find them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from dataclasses import asdict, fields, replace
from pathlib import Path

import psutil
from rich.console import Console

from parakit.artifacts.io import write_record
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.config.hardware import Device, Link, device_by_key, find_device, link_by_key
from parakit.config.model import ModelShape
from parakit.config.run import DeviceKind, RunSpec
from parakit.config.strategy import Batch, Parallelism
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.terminal import say
from parakit.formatting.units import DASH, plural
from parakit.launch import microbenchmark
from parakit.launch.devices import visible_gpus
from parakit.launch.flags import CPU_RANK_ENVIRONMENT
from parakit.launch.job import parse_devices
from parakit.launch.microbenchmark import Figures, Workload, attention_flops
from parakit.planner import (
    CONSTANT_NAMES,
    Calibration,
    Cluster,
    calibration_path,
    compute_device_rates,
    layer_seconds,
    load_constants,
    product_seconds,
)

TIMEOUT_SECONDS = 600.0
MEGATRON_LAYER, MEGATRON_LOOP = 4.5, 20.0
"""Host time of a layer of Megatron, and of its training loop for an iteration, in layers of PyTorch's
own encoder (`Workload.layer`): measured on a CPU rank with 4 and 12 layers of 16 tokens."""
GPU_LAYER, GPU_LOOP = 1.6, 9.4
"""The same on a GPU, whose kernels the host does not wait for: gpt2-tiny of 4 and 16 layers, one H200,
26.5 and 59.1 ms an iteration where an encoder layer took 1.65 ms (`make calibrate DEVICES=1gpu`,
`make train-baseline-gpt2-tiny-1gpu ITERS=20 EXTRA="--num-layers 16"`; one run each)."""
WORKLOADS = {
    DeviceKind.CPU: Workload(
        matmul_size=1024,
        attention_shape=(8, 256, 64),
        copy_bytes=16 << 20,
        layer=True,
        head=(256, 64, 50304),
        parameters=1 << 24,
        table=10 << 20,
        all_reduce_bytes=16 << 20,
        other_collectives=True,
        latency=True,
        spread=True,
        seconds_each=0.1,
        rounds=5,
        mean=True,
    ),
    DeviceKind.GPU: Workload(
        matmul_size=8192,
        attention_shape=(256, 2048, 128),
        copy_bytes=1 << 30,
        layer=True,
        all_reduce_bytes=256 << 20,
        latency=True,
        seconds_each=0.4,
        rounds=3,
        mean=True,
    ),
}


def calibrate_machine(devices: str | None, runs: Path, console: Console) -> int:
    """Measure this machine's GPUs, or where it has none its cores, and print what was shipped beside.

    Args:
        devices: `2gpu` or `2cpu`; None takes all GPUs, or a CPU rank for each core.
        runs: Folder of run folders.
        console: For the table.

    Raises:
        LaunchError: There are no such devices here, the planner knows no rates of them, or the
            measurement failed.
    """
    gpus, cores = len(visible_gpus()), len(os.sched_getaffinity(0))
    ranks, kind = (gpus, DeviceKind.GPU) if gpus else (cores, DeviceKind.CPU)
    if devices is not None:
        ranks, kind = parse_devices(devices.strip(), "DEVICES")
    device = find_local_device(kind, ranks, "DEVICES=2cpu measures CPU ranks")
    measured = calibrate(runs, kind, ranks, device, console)
    console.print(rich_table(_compared(measured, device)))
    kept, key = relative_to_root(calibration_path(runs, device)), device.key
    said = f"Kept in {kept}: 'make plan GPU={key}', 'make report' and train-auto-… use them."
    say(console, said)
    return 0


def find_local_device(kind: DeviceKind, ranks: int, instead: str, otherwise: str = "") -> Device:
    """What each of so many ranks has of this machine: one of its GPUs, or a core with its share of the
    memory that is free.

    Args:
        kind: Of the ranks.
        ranks: How many.
        instead: What to do where there are fewer GPUs; the end of a sentence.
        otherwise: What to do about a GPU without rates, beside adding it.

    Raises:
        LaunchError: There are not so many GPUs, or the planner knows no rates of them.
    """
    if kind is DeviceKind.CPU:
        share = psutil.virtual_memory().available // ranks
        return replace(device_by_key("cpu"), memory_bytes=share)
    names = [gpu.name for gpu in visible_gpus()]
    if len(names) < ranks:
        raise LaunchError(f"Needs {ranks} GPU{'s' * (ranks > 1)}, found {len(names)}; {instead}.")
    device = find_device(names[0])
    if device is None:
        raise LaunchError(
            f"The planner has no rates of '{names[0]}'; add it to src/parakit/config/hardware.yaml{otherwise}."
        )
    return device


def calibration_conditions(kind: DeviceKind, ranks: int) -> str:
    """What a calibration depends on beside machine and device: under others it is not valid."""
    cores = f" on {len(os.sched_getaffinity(0))} cores" if kind is DeviceKind.CPU else ""
    torch = importlib.metadata.version("torch")
    own = CPU_RANK_ENVIRONMENT if kind is DeviceKind.CPU else None
    taken = (WORKLOADS[kind], *(each.name for each in fields(Figures)), own)
    work = hashlib.sha256(repr(taken).encode()).hexdigest()[:8]
    return f"{plural(ranks, f'{kind} rank')}{cores}, a thread each, torch {torch}, workload {work}"


def calibrate(
    runs: Path, kind: DeviceKind, ranks: int, device: Device, console: Console, why: str = ""
) -> Calibration:
    """Measure for a few seconds on `ranks` devices at once, keep the result, return it.

    Raises:
        LaunchError: The measurement failed; with the last error of a rank.
    """
    place = plural(ranks, f"{kind} rank")
    console.print(f"Measuring {place}{why} …", highlight=False)
    try:
        work = WORKLOADS[kind]
        figures = microbenchmark.run_workload(work, kind, ranks, timeout_seconds=TIMEOUT_SECONDS)
    except LaunchError as error:
        raise LaunchError(f"The calibration on {place} failed: {error}") from None
    assert figures is not None  # There is one node.
    calibration = build_calibration(figures, kind, device, link_by_key(device.link))
    calibration = replace(calibration, made_with=calibration_conditions(kind, ranks))
    runs.mkdir(parents=True, exist_ok=True)
    write_record(calibration_path(runs, device), calibration)
    return calibration


def build_calibration(
    figures: Figures, kind: DeviceKind, device: Device, link: Link
) -> Calibration:
    """What the formulas take, rates as shares of the datasheet's (for a CPU: nominal) ones; what was not
    measured keeps its default."""
    peak_flops = device.peak_flops("fp32" if kind is DeviceKind.CPU else "bf16")
    assert peak_flops is not None
    ring = figures.all_reduce_bytes_per_second or link.bytes_per_second
    layer, on_gpu = figures.layer_seconds, kind is DeviceKind.GPU
    of_layer, of_loop = (GPU_LAYER, GPU_LOOP) if on_gpu else (MEGATRON_LAYER, MEGATRON_LOOP)

    def share(figure: float | None, nominal: float) -> float | None:
        return None if figure is None else figure / nominal

    measured = {
        "matmul": share(figures.matmul_flops, peak_flops),
        "attention": share(figures.attention_flops, peak_flops),
        "memory": share(figures.copy_bytes_per_second, device.memory_bytes_per_second),
        "link": share(figures.all_reduce_bytes_per_second, link.bytes_per_second),
        "reduce_scatter_share": share(figures.reduce_scatter_bytes_per_second, ring),
        "all_gather_share": share(figures.all_gather_bytes_per_second, ring),
        "all_to_all_share": share(figures.all_to_all_bytes_per_second, ring),
        "layer_launch_seconds": None if layer is None else of_layer * layer,
        "iteration_host_seconds": None if layer is None else of_loop * layer,
        "link_latency_seconds": figures.all_reduce_latency_seconds,
        "logit_seconds": figures.logit_seconds,
        "parameter_seconds": figures.parameter_seconds,
        "tensor_seconds": figures.tensor_seconds,
        "jitter": figures.jitter,
        "gradient_seconds": figures.gradient_seconds,
    }
    known = {name: value for name, value in measured.items() if value is not None}
    calibration = replace(Calibration(source=f"measured on {platform.node()}"), **known)  # type: ignore[arg-type]
    if on_gpu:
        return _rates_of_formulas(calibration, figures, device, link)
    # A CPU rank is one core: for what gloo's thread or Python does there, arithmetic waits.
    return replace(calibration, contention=1.0, launch_beside_work=False)


def _rates_of_formulas(
    measured: Calibration, figures: Figures, device: Device, link: Link
) -> Calibration:
    """Rates of products and attention with which the formulas give the timed kernels the time they took.

    Beside the rate the formulas count what a kernel reads, fills and computes again: the shares that it
    reached with all of that are too small for them.
    """
    work = WORKLOADS[DeviceKind.GPU]
    asymptotic = replace(measured, matmul=1.0, attention=1.0)
    rate = compute_device_rates(Cluster(device, 1, 1, link, link, asymptotic), "bf16")
    found: dict[str, float] = {}
    if (size := work.matmul_size) and figures.matmul_flops:
        whole, faster = (
            product_seconds(size, size, size, 2, replace(rate, flops=times * rate.flops))
            for times in (1, 2)
        )
        arithmetic = 2 * (whole - faster)
        operands = whole - arithmetic
        found["matmul"] = arithmetic / (2 * size**3 / figures.matmul_flops - operands)
    if (shape := work.attention_shape) and figures.attention_flops:
        heads, length, width = shape
        model = ModelShape(1, heads * width, heads, heads, width, 0, length, 0)
        layer = layer_seconds(RunSpec(model, Parallelism(), Batch(1, 1), dropout=0.0), rate)
        took = attention_flops(shape, causal=True) / figures.attention_flops
        found["attention"] = (layer.forward_attention + layer.backward_attention) / took
    return replace(measured, **found)  # type: ignore[arg-type]


def _compared(measured: Calibration, device: Device) -> Table[str]:
    """A row for each constant that was measured, beside what is shipped: shares of the datasheet's
    rates, and times."""
    shipped = asdict(load_constants(device.generation)) | {"link_latency_seconds": None}
    found = {name: getattr(measured, name) for name in (*CONSTANT_NAMES, "link_latency_seconds")}

    def text(name: str, value: float | None) -> str:
        if value is None:
            return DASH
        return f"{1e6 * value:,.0f} µs" if name.endswith("_seconds") else f"{value:.2f}"

    def title(name: str) -> str:
        return name.removesuffix("_seconds").replace("_", " ")

    columns = (
        Column[str]("constant", title, right=False),
        Column[str]("shipped", lambda name: text(name, shipped[name])),
        Column[str]("measured", lambda name: text(name, found[name])),
    )
    rows = tuple(name for name, value in found.items() if value is not None)
    return Table(columns, rows, device.name)
