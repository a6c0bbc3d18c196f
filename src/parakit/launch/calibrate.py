"""`make calibrate`: measure the planner's constants on this machine's devices, in about a minute.

The constants are stored per machine and device in the folder of runs. `make plan GPU=<device>`,
`make report` and `train-auto-…` read them there.
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
    DeviceRates,
    calibration_path,
    compute_device_rates,
    layer_seconds,
    load_constants,
    product_seconds,
)

TIMEOUT_SECONDS = 600.0
MEGATRON_LAYER, MEGATRON_LOOP = 4.5, 20.0
"""Host time of one Megatron layer, and of the training loop per iteration, on a CPU rank.

The unit is the time of PyTorch's own encoder layer (`Workload.layer`). Both were measured with 4 and 12
layers of 16 tokens.
"""
GPU_LAYER, GPU_LOOP = 1.6, 9.4
"""Host time of one Megatron layer, and of the training loop per iteration, on a GPU.

The unit is the same as in MEGATRON_LAYER; the host does not wait for the GPU's kernels. Measured with
gpt2-tiny of 4 and 16 layers on one H200: 26.5 and 59.1 ms per iteration, where an encoder layer took
1.65 ms (`make calibrate DEVICES=1gpu`, `make train-baseline-gpt2-tiny-1gpu ITERS=20 EXTRA="--num-layers
16"`; one run each).
"""
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
    """Measure this machine's devices, store the constants, and print them beside the shipped ones; return 0.

    Args:
        devices: `2gpu` or `2cpu`; None takes all GPUs, or one CPU rank per core if there is no GPU.
        runs: The folder of run folders.
        console: The terminal for the table.

    Raises:
        LaunchError: This machine lacks the devices, the planner does not know their rates, or the
            measurement failed.
    """
    if devices is not None:
        ranks, kind = parse_devices(devices.strip(), "DEVICES")
    else:
        num_gpus, num_cores = len(visible_gpus()), len(os.sched_getaffinity(0))
        ranks, kind = (num_gpus, DeviceKind.GPU) if num_gpus else (num_cores, DeviceKind.CPU)
    device = find_local_device(kind, ranks, "DEVICES=2cpu measures CPU ranks")
    measured = calibrate(runs, kind, ranks, device, console)
    console.print(rich_table(_comparison_table(measured, device)))
    path, key = relative_to_root(calibration_path(runs, device)), device.key
    say(
        console,
        f"Stored in {path}: 'make plan GPU={key}', 'make report' and train-auto-… use them.",
    )
    return 0


def find_local_device(kind: DeviceKind, ranks: int, instead: str, otherwise: str = "") -> Device:
    """Return the planner's description of the device that one rank uses: a GPU of this machine, or a CPU core.

    A CPU rank gets an equal fraction of the machine's free memory.

    Args:
        kind: Whether the ranks use GPUs or CPU cores.
        ranks: The number of ranks.
        instead: Advice that ends the error message on too few GPUs, such as `DEVICES=2cpu measures CPU ranks`.
        otherwise: Further advice that ends the error message on a GPU without known rates. It must begin with
            a comma; empty adds nothing.

    Raises:
        LaunchError: There are too few GPUs, or the planner does not know their rates.
    """
    if kind is DeviceKind.CPU:
        bytes_per_rank = psutil.virtual_memory().available // ranks
        return replace(device_by_key("cpu"), memory_bytes=bytes_per_rank)
    names = [gpu.name for gpu in visible_gpus()]
    if len(names) < ranks:
        raise LaunchError(f"Needs {plural(ranks, 'GPU')}, found {len(names)}; {instead}.")
    device = find_device(names[0])
    if device is None:
        raise LaunchError(
            f"The planner has no rates of '{names[0]}'; add it to src/parakit/config/hardware.yaml{otherwise}."
        )
    return device


def calibration_conditions(kind: DeviceKind, ranks: int) -> str:
    """Return a text that names what a calibration depends on, besides machine and device.

    A stored calibration is valid only while this text is the same. It names the ranks, the cores, the torch
    version and a hash of the workload.
    """
    cores, environment = "", None
    if kind is DeviceKind.CPU:
        cores, environment = f" on {len(os.sched_getaffinity(0))} cores", CPU_RANK_ENVIRONMENT
    torch = importlib.metadata.version("torch")
    figure_names = (field.name for field in fields(Figures))
    hashed = (WORKLOADS[kind], *figure_names, environment)
    digest = hashlib.sha256(repr(hashed).encode()).hexdigest()[:8]
    return (
        f"{plural(ranks, f'{kind} rank')}{cores}, a thread each, torch {torch}, workload {digest}"
    )


def calibrate(
    runs: Path, kind: DeviceKind, ranks: int, device: Device, console: Console, why: str = ""
) -> Calibration:
    """Measure on `ranks` devices at once for a few seconds, store the constants in `runs`, and return them.

    `why` is printed after the number of ranks.

    Raises:
        LaunchError: The measurement failed; the message has a rank's last error.
    """
    ranks_text = plural(ranks, f"{kind} rank")
    console.print(f"Measuring {ranks_text}{why} …", highlight=False)
    try:
        workload = WORKLOADS[kind]
        figures = microbenchmark.run_workload(
            workload, kind, ranks, timeout_seconds=TIMEOUT_SECONDS
        )
    except LaunchError as error:
        raise LaunchError(f"The calibration on {ranks_text} failed: {error}") from None
    assert figures is not None  # There is one node.
    calibration = build_calibration(figures, kind, device, link_by_key(device.link))
    calibration = replace(calibration, made_with=calibration_conditions(kind, ranks))
    runs.mkdir(parents=True, exist_ok=True)
    write_record(calibration_path(runs, device), calibration)
    return calibration


def build_calibration(
    figures: Figures, kind: DeviceKind, device: Device, link: Link
) -> Calibration:
    """Return the planner's constants from measured figures.

    Rates become fractions of the datasheet's rates (of the nominal rates for a CPU). A figure that was not
    measured keeps the constant's default.
    """
    is_gpu = kind is DeviceKind.GPU
    peak_flops = device.peak_flops("bf16" if is_gpu else "fp32")
    assert peak_flops is not None
    layer_factor, loop_factor = (GPU_LAYER, GPU_LOOP) if is_gpu else (MEGATRON_LAYER, MEGATRON_LOOP)
    # The other collectives are stored relative to the all-reduce, or to the link if there is none.
    ring_rate = figures.all_reduce_bytes_per_second or link.bytes_per_second
    measured = {
        "matmul": _divide(figures.matmul_flops, peak_flops),
        "attention": _divide(figures.attention_flops, peak_flops),
        "memory": _divide(figures.copy_bytes_per_second, device.memory_bytes_per_second),
        "link": _divide(figures.all_reduce_bytes_per_second, link.bytes_per_second),
        "reduce_scatter_share": _divide(figures.reduce_scatter_bytes_per_second, ring_rate),
        "all_gather_share": _divide(figures.all_gather_bytes_per_second, ring_rate),
        "all_to_all_share": _divide(figures.all_to_all_bytes_per_second, ring_rate),
        "link_latency_seconds": figures.all_reduce_latency_seconds,
        "logit_seconds": figures.logit_seconds,
        "parameter_seconds": figures.parameter_seconds,
        "tensor_seconds": figures.tensor_seconds,
        "jitter": figures.jitter,
        "gradient_seconds": figures.gradient_seconds,
    }
    if figures.layer_seconds is not None:
        measured["layer_launch_seconds"] = layer_factor * figures.layer_seconds
        measured["iteration_host_seconds"] = loop_factor * figures.layer_seconds
    constants = {name: value for name, value in measured.items() if value is not None}
    calibration = replace(Calibration(source=f"measured on {platform.node()}"), **constants)  # type: ignore[arg-type]
    if is_gpu:
        return _fit_rates_to_formulas(calibration, figures, device, link)
    # A CPU rank is one core, so arithmetic waits while gloo's thread or Python runs on the core.
    return replace(calibration, contention=1.0, launch_beside_work=False)


def _divide(figure: float | None, nominal: float) -> float | None:
    """Return a measured figure as a fraction of its nominal value; None if it was not measured."""
    return None if figure is None else figure / nominal


def _fit_rates_to_formulas(
    measured: Calibration, figures: Figures, device: Device, link: Link
) -> Calibration:
    """Return the constants with rates at which the planner's formulas give the measured kernel times.

    The formulas count the bytes that a kernel reads and writes, tile padding and recomputation separately.
    The measured rates include them, so they would be counted twice.
    """
    workload = WORKLOADS[DeviceKind.GPU]
    asymptotic = replace(measured, matmul=1.0, attention=1.0)
    device_rates = compute_device_rates(Cluster(device, 1, 1, link, link, asymptotic), "bf16")
    fitted: dict[str, float] = {}
    if workload.matmul_size and figures.matmul_flops:
        fitted["matmul"] = _fit_matmul_rate(
            workload.matmul_size, figures.matmul_flops, device_rates
        )
    if workload.attention_shape and figures.attention_flops:
        fitted["attention"] = _fit_attention_rate(
            workload.attention_shape, figures.attention_flops, device_rates
        )
    return replace(measured, **fitted)  # type: ignore[arg-type]


def _fit_matmul_rate(size: int, measured_flops: float, device_rates: DeviceRates) -> float:
    """Return the fraction of the peak FLOP/s at which a square product takes as long as it was measured to take.

    `device_rates` have the peak FLOP/s. The time of moving the operands does not depend on the fraction.
    """
    # Arithmetic takes half as long at twice the rate; the time of the operands stays.
    doubled_rates = replace(device_rates, flops=2 * device_rates.flops)
    seconds = product_seconds(size, size, size, 2, device_rates)
    seconds_at_double_rate = product_seconds(size, size, size, 2, doubled_rates)
    arithmetic_seconds = 2 * (seconds - seconds_at_double_rate)
    operand_seconds = seconds - arithmetic_seconds
    measured_seconds = 2 * size**3 / measured_flops
    return arithmetic_seconds / (measured_seconds - operand_seconds)


def _fit_attention_rate(
    shape: tuple[int, int, int], measured_flops: float, device_rates: DeviceRates
) -> float:
    """Return the fraction of the peak FLOP/s at which causal attention takes as long as it was measured to take.

    `shape` is heads, sequence length and head width. `device_rates` have the peak FLOP/s.
    """
    heads, length, width = shape
    model = ModelShape(
        layers=1,
        hidden=heads * width,
        heads=heads,
        query_groups=heads,
        head_width=width,
        ffn_hidden=0,
        seq_length=length,
        positions=0,
    )
    spec = RunSpec(model, Parallelism(), Batch(1, 1), dropout=0.0)
    layer = layer_seconds(spec, device_rates)
    predicted_seconds = layer.forward_attention + layer.backward_attention
    measured_seconds = attention_flops(shape, causal=True) / measured_flops
    return predicted_seconds / measured_seconds


def _comparison_table(measured: Calibration, device: Device) -> Table[str]:
    """Return a table with a row per measured constant: its shipped value and its measured value.

    Rates are fractions of the datasheet's rates, and times are in microseconds. Constants that were not measured
    are left out.
    """
    # No latency is shipped: it depends on the machine.
    shipped = asdict(load_constants(device.generation)) | {"link_latency_seconds": None}
    values = {name: getattr(measured, name) for name in (*CONSTANT_NAMES, "link_latency_seconds")}
    columns = (
        Column[str]("constant", _format_constant_name, right=False),
        Column[str]("shipped", lambda name: _format_constant(name, shipped[name])),
        Column[str]("measured", lambda name: _format_constant(name, values[name])),
    )
    rows = tuple(name for name, value in values.items() if value is not None)
    return Table(columns, rows, device.name)


def _format_constant_name(name: str) -> str:
    """Return a constant's name in words, without its unit."""
    return name.removesuffix("_seconds").replace("_", " ")


def _format_constant(name: str, value: float | None) -> str:
    """Return a constant's value: a time in microseconds, a fraction with two decimals, or a dash for None."""
    if value is None:
        return DASH
    if name.endswith("_seconds"):
        return f"{1e6 * value:,.0f} µs"
    return f"{value:.2f}"
