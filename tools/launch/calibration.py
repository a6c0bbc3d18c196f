"""Measured constants of this machine, as the planner reads them, in a file with the machine's name."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from tools.launch.compose import torchrun
from tools.launch.errors import LaunchError
from tools.plan.cluster import Calibration
from tools.spec.files import ROOT
from tools.spec.hardware import Device, Link
from tools.spec.run import DeviceKind


def calibration_path(runs: Path, device: Device) -> Path:
    """Where this machine's constants for a device are kept; `make plan GPU=<key>` looks there too."""
    return runs / f"calibration-{platform.node()}-{device.key}.json"


def calibrate(runs: Path, kind: DeviceKind, ranks: int, device: Device, link: Link) -> Calibration:
    """Measure for a few seconds on `ranks` devices at once, keep the result, return it.

    Raises:
        LaunchError: The measurement failed; with its last line.
    """
    figures = _measure(kind, ranks)
    calibration = from_figures(figures, kind, device, link)
    path = calibration_path(runs, device)
    runs.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(calibration), indent=2) + "\n")
    return calibration


def from_figures(
    figures: dict[str, float], kind: DeviceKind, device: Device, link: Link
) -> Calibration:
    """Shares of the datasheet's (for a CPU: nominal) rates; what was not measured keeps its default."""
    dtype = "fp32" if kind is DeviceKind.CPU else "bf16"
    peak = device.peak_flops(dtype)
    assert peak is not None
    measured = Calibration(
        matmul=figures["matmul_flops"] / peak,
        attention=figures["attention_flops"] / peak,
        memory=figures["bytes_per_second"] / device.memory_bytes_per_second,
        layer_launch_seconds=figures["layer_seconds"],
        source=f"measured on {platform.node()}",
    )
    if "link_bytes_per_second" in figures:
        measured = replace(
            measured,
            link=figures["link_bytes_per_second"] / link.bytes_per_second,
            link_latency_seconds=figures["link_latency_seconds"],
        )
    if kind is DeviceKind.GPU:
        return measured
    # A CPU rank is one core: for what gloo's thread or Python does there, arithmetic waits.
    return replace(measured, contention=1.0, launch_beside_work=False)


def _measure(kind: DeviceKind, ranks: int) -> dict[str, float]:
    target = "cpu" if kind is DeviceKind.CPU else "cuda"
    threads = {"OMP_NUM_THREADS": "1"} if kind is DeviceKind.CPU else {}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = (
            *torchrun(ranks, sys.executable),
            "-m",
            "tools.launch.calibration_rank",
            target,
            str(output),
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **threads}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0 or not output.is_file():
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise LaunchError(f"The calibration on {ranks} {kind} rank(s) failed: {last}")
        figures: dict[str, float] = json.loads(output.read_text())
    return figures
