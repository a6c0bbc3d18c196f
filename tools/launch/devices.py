"""The devices of this machine, through NVML and psutil; a machine without a driver has no GPUs."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import pynvml


@cache
def gpu_names() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs, in NVML's order; empty without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    return tuple(
        pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
        for index in range(pynvml.nvmlDeviceGetCount())
    )


def driver_version() -> str | None:
    """The NVIDIA driver's version."""
    return pynvml.nvmlSystemGetDriverVersion() if gpu_names() else None


@cache
def processor_name() -> str:
    """The CPU's own name for itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
