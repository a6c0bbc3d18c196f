"""How the GPUs of a run are joined: PCIe topology, NVLinks and peer access, through NVML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pynvml

from tools.launch.devices import Gpu
from tools.records.run import DeviceLink

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


def find_links(gpus: Sequence[Gpu]) -> tuple[DeviceLink, ...]:
    """The connection of each pair of GPUs, by rank; what NVML does not tell stays None."""
    return tuple(
        _link(first, second, gpus[first], gpus[second])
        for first, second in combinations(range(len(gpus)), 2)
    )


def describe_links(links: Iterable[DeviceLink]) -> str | None:
    """Every kind of connection once, such as `NVLink (18 links), peer access`; None without pairs."""
    return "; ".join(dict.fromkeys(map(_describe, links))) or None


def _describe(link: DeviceLink) -> str:
    path = (
        f"NVLink ({link.nvlinks} links)" if link.nvlinks else f"PCIe, {link.topology or 'unknown'}"
    )
    access = {True: ", peer access", False: ", no peer access", None: ""}
    return path + access[link.peer_access]


def _link(first: int, second: int, gpu: Gpu, peer: Gpu) -> DeviceLink:
    try:
        one, other = (pynvml.nvmlDeviceGetHandleByIndex(each.index) for each in (gpu, peer))
    except pynvml.NVMLError:
        return DeviceLink(first, second)
    return DeviceLink(
        first=first,
        second=second,
        topology=_topology(one, other),
        nvlinks=_nvlinks(one, other),
        peer_access=_peer(one, other, P2P_READ),
    )


def _topology(handle: Any, peer: Any) -> str | None:
    try:
        return TOPOLOGY.get(pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, peer))
    except pynvml.NVMLError:
        return None


def _peer(handle: Any, peer: Any, ability: int) -> bool | None:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(handle, peer, ability)
    except pynvml.NVMLError:
        return None
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _nvlinks(handle: Any, peer: Any) -> int | None:
    """Active links of the first GPU that lead to the second, or to the switch that joins them."""
    joined = _peer(handle, peer, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if not joined:
        return None if joined is None else 0
    other = pynvml.nvmlDeviceGetPciInfo(peer).busId
    return sum(_leads_to(handle, link, other) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))


def _leads_to(handle: Any, link: int, bus_id: str) -> bool:
    try:
        if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
            return False
        kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return True
        return bool(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId == bus_id)
    except pynvml.NVMLError:
        return False
