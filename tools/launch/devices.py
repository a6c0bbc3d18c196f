"""The devices of this machine, through NVML and psutil; a machine without a driver has no GPUs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pynvml


@dataclass(frozen=True)
class Gpu:
    """One GPU, by NVML's number (that of the PCI bus, with CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA's too)."""

    index: int
    uuid: str
    name: str
    memory_bytes: int


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every NVIDIA GPU, in NVML's order; empty without a driver."""
    try:
        pynvml.nvmlInit()
        return tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows to the ranks, in rank order: all, or those of CUDA_VISIBLE_DEVICES.

    Like CUDA, a name that fits nothing ends the list.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return all_gpus()
    found: list[Gpu] = []
    for word in chosen.split(","):
        gpu = _named(word.strip())
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return tuple(found)


def gpu_names() -> tuple[str, ...]:
    """Names of the visible GPUs; empty without a driver."""
    return tuple(gpu.name for gpu in visible_gpus())


def memory_used_bytes(gpu: Gpu) -> int:
    """Memory in use by anybody, as nvidia-smi shows it: without what the driver reserves."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.used)


def process_ids(gpu: Gpu) -> tuple[int, ...]:
    """Processes that compute on it, as far as NVML sees them (in a container often none)."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return ()
    return tuple(process.pid for process in running)


def driver_version() -> str | None:
    """The NVIDIA driver's version."""
    return pynvml.nvmlSystemGetDriverVersion() if all_gpus() else None


@cache
def processor_name() -> str:
    """The CPU's own name for itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _named(word: str) -> Gpu | None:
    if word.startswith("GPU-"):
        fitting = [gpu for gpu in all_gpus() if gpu.uuid.startswith(word)]
        return fitting[0] if len(fitting) == 1 else None
    return next((gpu for gpu in all_gpus() if word == str(gpu.index)), None)
