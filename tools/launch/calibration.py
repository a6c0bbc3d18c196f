"""Measured constants of this machine, as the planner reads them, in a file with the machine's name."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, replace
from pathlib import Path

from tools.launch import microbenchmark
from tools.launch.errors import LaunchError
from tools.launch.microbenchmark import Figures, Workload
from tools.plan.time.cluster import Calibration
from tools.spec.hardware import Device, Link
from tools.spec.run import DeviceKind

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


def calibration_path(runs: Path, device: Device) -> Path:
    """Where this machine's constants for a device are kept; `make plan GPU=<key>` looks there too."""
    return runs / f"calibration-{platform.node()}-{device.key}.json"


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
