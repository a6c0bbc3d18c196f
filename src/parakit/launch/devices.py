"""The devices of this machine, how they are connected, and what each reports while its rank trains.

GPUs are read through NVML: a machine without an NVIDIA driver has none, and what NVML does not report is
None. `python -m parakit.launch.devices` prints what they are as JSON, for `make doctor`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import pynvml

from parakit.artifacts.run import DeviceLink
from parakit.cluster import GpuUse

TOPOLOGY = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "same board",
    pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PCIe host bridge",
    pynvml.NVML_TOPOLOGY_NODE: "one NUMA node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "between NUMA nodes",
}
"""nvidia-smi's PIX, PXB, PHB, NODE and SYS, in words."""

P2P_READ = 0
"""`NVML_P2P_CAPS_INDEX_READ`; pynvml's own constant is the tuple (0,), which NVML's call refuses."""


THROTTLE_REASONS = {
    0x2: "applications clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks setting",
    0x200: "board limit",
    0x400: "reliability voltage",
}
"""Bits of `nvmlClocksEventReasons`. Bit 0, an idle GPU, is no throttling and is left out."""

DeviceSample = Mapping[str, Any]
"""Of one device: values by column of `samples.csv`; what the device does not report is left out."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, by NVML's number (that of the PCI bus, with CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA's too)."""

    index: int
    uuid: str
    name: str
    memory_bytes: int

    @property
    def handle(self) -> Any:
        """NVML's; raises NVMLError where the GPU has fallen off the bus."""
        return pynvml.nvmlDeviceGetHandleByIndex(self.index)


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

    Like CUDA, an entry that names no GPU ends the list.
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


def memory_used_bytes(gpu: Gpu) -> int:
    """Memory in use by all processes, as nvidia-smi shows it: without what the driver reserves."""
    ask, handle = pynvml.nvmlDeviceGetMemoryInfo, gpu.handle
    memory = _answer(partial(ask, handle, version=pynvml.nvmlMemory_v2)) or ask(handle)
    return int(memory.used)


def process_ids(gpu: Gpu) -> tuple[int, ...]:
    """Processes that compute on it, as far as NVML sees them (in a container often none)."""
    running = _answer(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu.handle)
    return tuple(process.pid for process in running or ())


def clock_limit_mhz(gpu: Gpu) -> int | None:
    """The highest clock that its multiprocessors can reach."""
    limit = _answer(lambda: pynvml.nvmlDeviceGetMaxClockInfo(gpu.handle, pynvml.NVML_CLOCK_SM))
    return None if limit is None else int(limit)


def gpu_use(gpu: Gpu) -> GpuUse:
    """A GPU with its present use, for the checks of doctor and preflight."""
    used, processes = memory_used_bytes(gpu), process_ids(gpu)
    return GpuUse(gpu.index, gpu.name, gpu.memory_bytes, used, processes)


def driver_version() -> str | None:
    """The NVIDIA driver's version."""
    return pynvml.nvmlSystemGetDriverVersion() if all_gpus() else None


def driver_problem() -> str | None:
    """Why an installed driver does not answer; None if it answers or there is none."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        return str(error)
    return None


def describe_machine() -> dict[str, Any]:
    """Driver, every GPU with its use, and the connection of each pair, as JSON takes them."""
    gpus = all_gpus()
    links = find_links(gpus)
    return {
        "driver": driver_version(),
        "problem": driver_problem(),
        "gpus": [gpu_use(gpu)._asdict() for gpu in gpus],
        "links": [asdict(link) for link in links],
        "connection": describe_links(links),
    }


@cache
def processor_name() -> str:
    """The CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def find_links(gpus: Sequence[Gpu]) -> tuple[DeviceLink, ...]:
    """The connection of each pair of GPUs, by rank; what NVML does not report stays None."""
    return tuple(
        _link(first, second, gpus[first], gpus[second])
        for first, second in combinations(range(len(gpus)), 2)
    )


def describe_links(links: Iterable[DeviceLink]) -> str | None:
    """Every kind of connection once, such as `NVLink (18 links), peer access`; None without pairs."""
    access = {True: ", peer access", False: ", no peer access", None: ""}
    kinds: dict[str, None] = {}
    for link in links:
        pcie = f"PCIe, {link.topology or 'unknown'}"
        path = f"NVLink ({link.nvlinks} links)" if link.nvlinks else pcie
        kinds[path + access[link.peer_access]] = None
    return "; ".join(kinds) or None


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


def _link(first: int, second: int, gpu: Gpu, peer: Gpu) -> DeviceLink:
    try:
        one, other = gpu.handle, peer.handle
    except pynvml.NVMLError:
        return DeviceLink(first, second)
    nearest = _answer(pynvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    connected = _peer(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    nvlinks = None if connected is None else 0
    if connected:
        # Active links of the first that lead to the second, or to the switch between them.
        bus_id = pynvml.nvmlDeviceGetPciInfo(other).busId
        links = range(pynvml.NVML_NVLINK_MAX_LINKS)
        nvlinks = sum(bool(_answer(_leads_to, one, link, bus_id)) for link in links)
    topology = None if nearest is None else TOPOLOGY.get(nearest)
    return DeviceLink(first, second, topology, nvlinks, _peer(one, other, P2P_READ))


def _peer(handle: Any, peer: Any, ability: int) -> bool | None:
    status = _answer(pynvml.nvmlDeviceGetP2PStatus, handle, peer, ability)
    return None if status is None else bool(status == pynvml.NVML_P2P_STATUS_OK)


def _answer(question: Callable[..., Any], *of: Any) -> Any:
    """None where NVML does not report it."""
    try:
        return question(*of)
    except pynvml.NVMLError:
        return None


def _leads_to(handle: Any, link: int, bus_id: str) -> bool:
    if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
        return False
    kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return True
    return bool(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId == bus_id)


def make_cpu_sampler(
    by_rank: Callable[[], Mapping[int, psutil.Process]],
) -> Callable[[], Iterator[tuple[int, DeviceSample]]]:
    """What reads CPU ranks: each process's share of a core and resident memory."""
    known: dict[int, psutil.Process] = {}

    def read() -> Iterator[tuple[int, DeviceSample]]:
        for rank, process in sorted(by_rank().items()):
            # cpu_percent measures since its last call, so the process object must be kept.
            same = known.setdefault(rank, process)
            with suppress(psutil.Error):
                reading = {
                    "device": processor_name(),
                    "utilisation_percent": same.cpu_percent(),
                    "memory_bytes": same.memory_info().rss,
                }
                yield rank, reading

    return read


def sample_gpus(gpus: Sequence[Gpu], first: int = 0) -> Iterator[tuple[int, DeviceSample]]:
    """One reading a rank, the r-th from `first` on of the r-th GPU; none of one that was lost."""
    for rank, gpu in enumerate(gpus, start=first):
        if (handle := _answer(lambda gpu=gpu: gpu.handle)) is not None:
            yield rank, {"device": gpu.name, **_reported(gpu, handle)}


def name_throttle_reasons(bits: int) -> str:
    """Names of the reasons in a bit mask, `none` if there are none."""
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~(0x1 | sum(THROTTLE_REASONS))
    return " + ".join((*names, *((f"{unknown:#x}",) if unknown else ()))) or "none"


def _reported(gpu: Gpu, handle: Any) -> DeviceSample:
    """Not every GPU and driver answers every question."""
    questions: dict[str, Callable[[], object]] = {
        "utilisation_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_bytes": lambda: memory_used_bytes(gpu),
        "power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(
            handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "throttle_reasons": lambda: name_throttle_reasons(_event_reasons(handle)),
    }
    answers = {column: _answer(ask) for column, ask in questions.items()}
    return {column: answer for column, answer in answers.items() if answer is not None}


def _event_reasons(handle: Any) -> Any:
    bits = _answer(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    # Drivers before 535 know the older name alone.
    return pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) if bits is None else bits


if __name__ == "__main__":
    print(json.dumps(describe_machine()))
