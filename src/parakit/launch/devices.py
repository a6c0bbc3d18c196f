"""Describe this machine's devices and their links, and sample them while ranks train.

GPUs are read through NVML. A machine without an NVIDIA driver has none, and what NVML does not report is
None. `python -m parakit.launch.devices` prints the description as JSON for `make doctor`.
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
"""Descriptions of nvidia-smi's PIX, PXB, PHB, NODE and SYS."""

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
"""Bits of `nvmlClocksEventReasons`, without the bit of an idle GPU, which is no throttling."""

_IDLE_BIT = 0x1

_PEER_ACCESS = {True: ", peer access", False: ", no peer access", None: ""}
"""Ends of a link's description; None means that NVML does not report whether GPUs read each other's memory."""

DeviceSample = Mapping[str, Any]
"""What one device reports: values by column of `samples.csv`, without columns that it does not report."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, with NVML's index, which is the order of PCI buses (CUDA's too with CUDA_DEVICE_ORDER=PCI_BUS_ID)."""

    index: int
    uuid: str
    name: str
    memory_bytes: int

    @property
    def handle(self) -> Any:
        """NVML's handle of the GPU; reading it raises NVMLError if the GPU has fallen off the bus."""
        return pynvml.nvmlDeviceGetHandleByIndex(self.index)


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Return every NVIDIA GPU of this machine in NVML's order; empty without a driver."""
    try:
        pynvml.nvmlInit()
        return tuple(_describe_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows to the ranks, in rank order: all, or those of CUDA_VISIBLE_DEVICES.

    As in CUDA, an entry that names no GPU ends the list.
    """
    entries = environment.get("CUDA_VISIBLE_DEVICES")
    if entries is None:
        return all_gpus()
    gpus: list[Gpu] = []
    for entry in entries.split(","):
        gpu = _find_gpu(entry.strip())
        if gpu is None or gpu in gpus:
            break
        gpus.append(gpu)
    return tuple(gpus)


def memory_used_bytes(gpu: Gpu) -> int:
    """Return the bytes that all processes use, as nvidia-smi shows them: without the driver's reserve."""
    handle = gpu.handle
    # Only the second version of the answer leaves the reserve out; old drivers know the first alone.
    query = partial(pynvml.nvmlDeviceGetMemoryInfo, handle, version=pynvml.nvmlMemory_v2)
    memory = _call_if_supported(query)
    if memory is None:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.used)


def process_ids(gpu: Gpu) -> tuple[int, ...]:
    """Return the processes that compute on the GPU, as far as NVML sees them; in a container often none."""
    running = _call_if_supported(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu.handle)
    return tuple(process.pid for process in running or ())


def clock_limit_mhz(gpu: Gpu) -> int | None:
    """Return the highest clock that the GPU's multiprocessors can reach; None if NVML does not report it."""
    limit = _call_if_supported(
        lambda: pynvml.nvmlDeviceGetMaxClockInfo(gpu.handle, pynvml.NVML_CLOCK_SM)
    )
    return None if limit is None else int(limit)


def gpu_use(gpu: Gpu) -> GpuUse:
    """Return the GPU with its present use, for the checks of doctor and preflight."""
    used_bytes, processes = memory_used_bytes(gpu), process_ids(gpu)
    return GpuUse(gpu.index, gpu.name, gpu.memory_bytes, used_bytes, processes)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None without a GPU."""
    return pynvml.nvmlSystemGetDriverVersion() if all_gpus() else None


def driver_problem() -> str | None:
    """Return why an installed driver does not answer; None if it answers or no driver is installed."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        return str(error)
    return None


def describe_machine() -> dict[str, Any]:
    """Return driver, GPUs with their use, and the link of each pair of GPUs, ready for JSON."""
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
    """Return the CPU's model name; the machine's architecture if Linux does not report the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        if line.startswith("model name"):
            _, _, name = line.partition(":")
            return name.strip()
    return platform.machine()


def find_links(gpus: Sequence[Gpu]) -> tuple[DeviceLink, ...]:
    """Return the link of each pair of GPUs, with their positions as ranks; what NVML does not report is None."""
    return tuple(
        _describe_link(first, second, gpus[first], gpus[second])
        for first, second in combinations(range(len(gpus)), 2)
    )


def describe_links(links: Iterable[DeviceLink]) -> str | None:
    """Return each kind of link once, such as `NVLink (18 links), peer access`; None without pairs."""
    # A dictionary keeps each kind once, in the order of the links.
    kinds = dict.fromkeys(_describe_kind(link) for link in links)
    return "; ".join(kinds) or None


def _describe_kind(link: DeviceLink) -> str:
    """Return the kind of one link: NVLink or PCIe, and whether the GPUs read each other's memory."""
    access = _PEER_ACCESS[link.peer_access]
    if link.nvlinks:
        return f"NVLink ({link.nvlinks} links){access}"
    return f"PCIe, {link.topology or 'unknown'}{access}"


def _describe_gpu(index: int) -> Gpu:
    """Return index, UUID, name and memory of the GPU with this NVML index."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _find_gpu(entry: str) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names; None if there is none or several match."""
    if entry.startswith("GPU-"):
        matching = [gpu for gpu in all_gpus() if gpu.uuid.startswith(entry)]
        return matching[0] if len(matching) == 1 else None
    return next((gpu for gpu in all_gpus() if entry == str(gpu.index)), None)


def _describe_link(first: int, second: int, gpu: Gpu, peer: Gpu) -> DeviceLink:
    """Return the link between two GPUs. If one of the GPUs is lost, the link has no properties."""
    try:
        handle, peer_handle = gpu.handle, peer.handle
    except pynvml.NVMLError:
        return DeviceLink(first, second)
    nearest = _call_if_supported(pynvml.nvmlDeviceGetTopologyCommonAncestor, handle, peer_handle)
    topology = None if nearest is None else TOPOLOGY.get(nearest)
    nvlinks = _count_nvlinks(handle, peer_handle)
    return DeviceLink(first, second, topology, nvlinks, _can_access(handle, peer_handle, P2P_READ))


def _count_nvlinks(handle: Any, peer: Any) -> int | None:
    """Return the number of a GPU's NVLinks to its peer, or to the switch between them; None if not reported."""
    has_nvlink = _can_access(handle, peer, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if has_nvlink is None:
        return None
    if not has_nvlink:
        return 0
    bus_id = pynvml.nvmlDeviceGetPciInfo(peer).busId
    num_links = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        if _call_if_supported(_link_leads_to, handle, link, bus_id):
            num_links += 1
    return num_links


def _can_access(handle: Any, peer: Any, ability: int) -> bool | None:
    """Return True if NVML grants the GPU `ability` towards its peer; None if NVML does not report it."""
    status = _call_if_supported(pynvml.nvmlDeviceGetP2PStatus, handle, peer, ability)
    return None if status is None else bool(status == pynvml.NVML_P2P_STATUS_OK)


def _call_if_supported(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of an NVML function; None if the GPU or the driver does not support it."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _link_leads_to(handle: Any, link: int, bus_id: str) -> bool:
    """Return True if an NVLink is active and leads to the GPU with this bus id, or to a switch."""
    if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
        return False
    kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return True
    return bool(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId == bus_id)


def make_cpu_sampler(
    find_by_rank: Callable[[], Mapping[int, psutil.Process]],
) -> Callable[[], Iterator[tuple[int, DeviceSample]]]:
    """Return a function that yields rank and sample of each CPU rank: use of its core, resident memory.

    `find_by_rank` returns the rank processes that live now.
    """
    known_processes: dict[int, psutil.Process] = {}

    def sample_ranks() -> Iterator[tuple[int, DeviceSample]]:
        for rank, process in sorted(find_by_rank().items()):
            # cpu_percent measures since its last call on the same object, so the first object is kept.
            known_process = known_processes.setdefault(rank, process)
            with suppress(psutil.Error):
                sample = {
                    "device": processor_name(),
                    "utilisation_percent": known_process.cpu_percent(),
                    "memory_bytes": known_process.memory_info().rss,
                }
                yield rank, sample

    return sample_ranks


def sample_gpus(gpus: Sequence[Gpu], first: int = 0) -> Iterator[tuple[int, DeviceSample]]:
    """Yield rank and sample of each GPU; the first GPU's rank is `first`. A GPU that was lost yields nothing."""
    for rank, gpu in enumerate(gpus, start=first):
        try:
            handle = gpu.handle
        except pynvml.NVMLError:
            continue
        yield rank, {"device": gpu.name, **_sample_gpu(gpu, handle)}


def name_throttle_reasons(bits: int) -> str:
    """Return the names of the reasons in NVML's bit mask, joined by ` + `; `none` if no bit is set.

    Bits without a name are written as one hexadecimal number.
    """
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    named_bits = _IDLE_BIT | sum(THROTTLE_REASONS)
    unnamed_bits = bits & ~named_bits
    if unnamed_bits:
        names.append(f"{unnamed_bits:#x}")
    return " + ".join(names) or "none"


def _sample_gpu(gpu: Gpu, handle: Any) -> DeviceSample:
    """Return the properties that this GPU and its driver report, by column; others are left out."""
    queries: dict[str, Callable[[], object]] = {
        "utilisation_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_bytes": lambda: memory_used_bytes(gpu),
        "power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(
            handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "throttle_reasons": lambda: name_throttle_reasons(_read_throttle_bits(handle)),
    }
    answers = {column: _call_if_supported(query) for column, query in queries.items()}
    return {column: answer for column, answer in answers.items() if answer is not None}


def _read_throttle_bits(handle: Any) -> Any:
    """Return NVML's bit mask of throttle reasons; drivers before 535 only know the older function."""
    bits = _call_if_supported(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is not None:
        return bits
    return pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)


if __name__ == "__main__":
    print(json.dumps(describe_machine()))
