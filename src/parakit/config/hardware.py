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

import msgspec

from parakit.config.files import read_yaml

_FILE = Path(__file__).with_name("hardware.yaml")
_UNITS = {
    "gb_per_second": ("bytes_per_second", 1e9),
    "_mib": ("_bytes", 2**20),
    "_us": ("_seconds", 1e-6),
}
"""Ends of the file's names, and of the fields."""


@dataclass(frozen=True)
class Link:
    """A connection between devices: what one of them can send, in one direction."""

    key: str
    name: str
    bytes_per_second: float
    latency_seconds: float
    """Of one collective or point-to-point call, however small (an estimate, not a datasheet's)."""
    source: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostRates:
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
    peak_tflops: Mapping[str, float] = field(hash=False)
    """By dtype: fp16, bf16, fp8, tf32, fp32."""
    memory_bytes: int
    memory_bytes_per_second: float
    processors: int
    """Streaming multiprocessors, or what else computes a tile of a matrix product on its own."""
    power_watts: float
    """The module's limit: under tensor load the clock is as high as it allows."""
    architecture: str
    link: str
    """Key of the link between devices of one node."""
    network: str
    """Key of the usual link between nodes."""
    verified: bool
    source: str
    aliases: tuple[str, ...] = ()
    """Other keys that people give it."""
    domain: int = 8
    """Devices that one NVLink switch joins, a node's or a rack's."""
    host: HostRates | None = None
    """None where it was not looked up."""

    @property
    def generation(self) -> str:
        """Of the architecture: devices of one share what kernels reach of their datasheets."""
        return self.architecture.split()[0].lower()

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
def load_hardware() -> Hardware:
    """Read the devices and links."""
    data = {
        what: {key: {"key": key} | _convert_to_base_units(entry) for key, entry in entries.items()}
        for what, entries in read_yaml(_FILE).items()
    }
    return msgspec.convert(data, Hardware)


def find_device(name: str) -> Device | None:
    """The device that a driver calls `name` (NVML, nvidia-smi, torch.cuda); None if unknown.

    Only whole names match: an H100 PCIe is not an H100 SXM.
    """
    wanted, devices = _plain(name), load_hardware().devices.values()
    return next((each for each in devices if wanted in map(_plain, each.nvml_names)), None)


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
    if (found := find_device(key)) is None:
        raise UnknownHardwareError(_hint("GPU", key, devices))
    return found


def link_by_key(key: str) -> Link:
    """The link of a key (`nvlink4`, `ib-400g`) or an alias (`100gbe`); raises as `device_by_key`."""
    links = load_hardware().links
    for link in links.values():
        if key.lower() in (link.key, *link.aliases):
            return link
    raise UnknownHardwareError(_hint("link", key, links))


def calibration_file_name(key: str) -> str:
    """Name of the file with this machine's measured constants for a device, in the folder of runs."""
    return f"calibration-{platform.node()}-{key}.json"


def _hint(what: str, key: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(key.lower(), known, n=3, cutoff=0.4) or list(known)
    return f"There is no {what} '{key}'; did you mean {' or '.join(near)}?"


def _words(key: str) -> frozenset[str]:
    return frozenset(re.split(r"[-_\s]+", key.casefold().strip()))


def _plain(name: str) -> str:
    return name.casefold().removeprefix("nvidia").strip()


def _convert_to_base_units(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    found = {}
    for name, value in entry.items():
        unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
        base, factor = _UNITS.get(unit, ("", 1))
        found[name.removesuffix(unit) + base] = (
            value * factor if unit else _convert_to_base_units(value)
        )
    return found
