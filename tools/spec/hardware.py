"""Devices and links as data: `hardware.yaml`, looked up by key or by the name a driver gives."""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tools.spec.files import read_yaml

_FILE = Path(__file__).with_name("hardware.yaml")
_MIB = 2**20


@dataclass(frozen=True)
class Link:
    """A connection between devices: what one of them can send, in one direction."""

    key: str
    name: str
    bytes_per_second: float
    latency_seconds: float
    """Of one collective or point-to-point call, however small (an estimate, not a datasheet's)."""
    source: str


@dataclass(frozen=True)
class Host:
    """A device's share of the usual machine around it."""

    link_bytes_per_second: float
    """Between device and host memory, in one direction."""
    memory_bytes_per_second: float
    source: str


@dataclass(frozen=True)
class Device:
    """An accelerator; rates are dense peaks."""

    key: str
    name: str
    nvml_names: tuple[str, ...]
    aliases: tuple[str, ...]
    """Other keys that people give it."""
    peak_tflops: Mapping[str, float] = field(hash=False)
    """By dtype: fp16, bf16, fp8, tf32, fp32."""
    memory_bytes: int
    memory_bytes_per_second: float
    processors: int
    """Streaming multiprocessors, or what else computes a tile of a matrix product on its own."""
    power_watts: float
    """The module's limit: under tensor load the clock is as high as it allows."""
    generation: str
    """Of the architecture: devices of one share what kernels reach of their datasheets."""
    domain: int
    """Devices that one NVLink switch joins, a node's or a rack's."""
    link: str
    """Key of the link between devices of one node."""
    network: str
    """Key of the usual link between nodes."""
    verified: bool
    source: str
    host: Host | None = None
    """None where it was not looked up."""

    def peak_flops(self, dtype: str) -> float | None:
        """Dense peak in FLOP/s for matrix products in `dtype`; None if the device has no such."""
        tflops = self.peak_tflops.get(dtype)
        return None if tflops is None else tflops * 1e12


@dataclass(frozen=True)
class Hardware:
    """Contents of `hardware.yaml`."""

    devices: Mapping[str, Device]
    links: Mapping[str, Link]


class UnknownHardwareError(ValueError):
    """No device or link of that key; the message lists the near ones."""


@cache
def load_hardware(path: Path = _FILE) -> Hardware:
    """Read the devices and links."""
    data = read_yaml(path)
    return Hardware(
        devices={key: _device(key, entry) for key, entry in data["devices"].items()},
        links={key: _link(key, entry) for key, entry in data["links"].items()},
    )


def find_device(name: str) -> Device | None:
    """The device that a driver calls `name` (NVML, nvidia-smi, torch.cuda); None if unknown.

    Only whole names match: an H100 PCIe is not an H100 SXM.
    """
    wanted = _plain(name)
    for device in load_hardware().devices.values():
        if wanted in (_plain(known) for known in device.nvml_names):
            return device
    return None


def device_by_key(key: str) -> Device:
    """The device of a key (`h200`), of an alias (`h100-sxm`) or of a driver's name.

    Raises:
        UnknownHardwareError: There is neither.
    """
    devices = load_hardware().devices
    wanted = _words(key)
    for device in devices.values():
        if wanted in map(_words, (device.key, *device.aliases)):
            return device
    found = find_device(key)
    if found is None:
        raise UnknownHardwareError(_hint("GPU", key, devices))
    return found


def link_by_key(key: str) -> Link:
    """The link of a key (`nvlink4`, `ib-400g`); raises as `device_by_key`."""
    links = load_hardware().links
    if key.lower() not in links:
        raise UnknownHardwareError(_hint("link", key, links))
    return links[key.lower()]


def calibration_file(key: str) -> str:
    """Name of the file with this machine's measured constants for a device, in the folder of runs."""
    return f"calibration-{platform.node()}-{key}.json"


def _hint(what: str, key: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(key.lower(), known, n=3, cutoff=0.4) or list(known)
    return f"There is no {what} '{key}'; did you mean {' or '.join(near)}?"


def _words(key: str) -> frozenset[str]:
    return frozenset(re.split(r"[-_\s]+", key.casefold().strip()))


def _plain(name: str) -> str:
    return name.casefold().removeprefix("nvidia").strip()


def _device(key: str, entry: Mapping[str, Any]) -> Device:
    return Device(
        key=key,
        name=entry["name"],
        nvml_names=tuple(entry["nvml"]),
        aliases=tuple(map(str, entry.get("aliases", ()))),
        peak_tflops={dtype: float(rate) for dtype, rate in entry["peak_tflops"].items()},
        memory_bytes=entry["memory_mib"] * _MIB,
        memory_bytes_per_second=entry["memory_gb_per_second"] * 1e9,
        processors=entry["processors"],
        power_watts=entry["power_watts"],
        generation=entry["architecture"].split()[0].lower(),
        domain=entry.get("domain", 8),
        link=entry["link"],
        network=entry["network"],
        verified=entry["verified"],
        source=entry["source"],
        host=_host(entry["host"]) if "host" in entry else None,
    )


def _host(entry: Mapping[str, Any]) -> Host:
    return Host(
        link_bytes_per_second=entry["gb_per_second"] * 1e9,
        memory_bytes_per_second=entry["memory_gb_per_second"] * 1e9,
        source=entry["source"],
    )


def _link(key: str, entry: Mapping[str, Any]) -> Link:
    return Link(
        key=key,
        name=entry["name"],
        bytes_per_second=entry["gb_per_second"] * 1e9,
        latency_seconds=entry["latency_us"] * 1e-6,
        source=entry["source"],
    )
