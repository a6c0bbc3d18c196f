"""Devices and links from `hardware.yaml`, found by key or by the name that a driver reports."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from parakit.config.errors import suggest_names
from parakit.config.files import read_yaml

_FILE = Path(__file__).with_name("hardware.yaml")
_UNITS = {
    "gb_per_second": ("bytes_per_second", 1e9),
    "_mib": ("_bytes", 2**20),
    "_us": ("_seconds", 1e-6),
}
"""Suffixes of the YAML file's keys, with the suffix of the field and the factor to base units."""


@dataclass(frozen=True)
class Link:
    """Connection between devices. Its rate is the rate of one device in one direction."""

    key: str
    name: str
    bytes_per_second: float
    latency_seconds: float
    """Latency per collective or point-to-point call of any size: an estimate, not a datasheet's
    value.
    """
    source: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostRates:
    """Host bandwidth per device in the usual machine around a device."""

    link_bytes_per_second: float
    """Rate between device and host memory in one direction."""
    memory_bytes_per_second: float
    source: str


@dataclass(frozen=True)
class Device:
    """Accelerator, or a core of a CPU. Its FLOP rates are peaks without sparsity."""

    key: str
    name: str
    nvml_names: tuple[str, ...]
    peak_tflops: Mapping[str, float] = field(hash=False)
    """Peak TFLOP/s by dtype: fp16, bf16, fp8, tf32, fp32."""
    memory_bytes: int
    memory_bytes_per_second: float
    processors: int
    """Streaming multiprocessors, or the units of another device that compute one tile of a matrix
    product.
    """
    power_watts: float
    """The module's power limit. Under tensor load it limits the clock."""
    architecture: str
    link: str
    """Key of the link between devices of one node."""
    network: str
    """Key of the usual link between nodes."""
    verified: bool
    source: str
    aliases: tuple[str, ...] = ()
    """Other keys that users write for the device."""
    domain: int = 8
    """Number of devices that one NVLink switch connects: those of a node or of a rack."""
    host: HostRates | None = None
    """Host bandwidth; None if unknown."""

    @property
    def generation(self) -> str:
        """First word of the architecture, in lower case. Devices of one generation share kernel
        efficiencies.
        """
        return self.architecture.split()[0].lower()

    def peak_flops(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s of matrix products in `dtype`; None if the device has no
        such type.
        """
        tflops = self.peak_tflops.get(dtype)
        return None if tflops is None else tflops * 1e12


@dataclass(frozen=True)
class Hardware:
    """Devices and links in `hardware.yaml`, by key."""

    devices: Mapping[str, Device]
    links: Mapping[str, Link]


class UnknownHardwareError(ValueError):
    """A device or link key that is unknown; the message lists similar keys."""


@cache
def load_hardware() -> Hardware:
    """Return the devices and links of `hardware.yaml`. The file is read once per process."""
    data: dict[str, dict[str, Any]] = {}
    for section, entries in read_yaml(_FILE).items():
        data[section] = {}
        for key, entry in entries.items():
            data[section][key] = {"key": key} | _convert_to_base_units(entry)
    return msgspec.convert(data, Hardware)


def find_device(name: str) -> Device | None:
    """Return the device that the driver calls `name`, in NVML, nvidia-smi or torch.cuda.

    The result is None if no device has that name.

    Only full names match: an H100 PCIe is not an H100 SXM.
    """
    plain_name = _normalise_driver_name(name)
    for device in load_hardware().devices.values():
        if plain_name in map(_normalise_driver_name, device.nvml_names):
            return device
    return None


def device_by_key(key: str) -> Device:
    """Return the device with this key (`h200`), alias (`h100-sxm`) or driver name.

    Raises:
        UnknownHardwareError: No device has that key or name.
    """
    devices = load_hardware().devices
    words_of_key = _split_key(key)
    for device in devices.values():
        if words_of_key in map(_split_key, (device.key, *device.aliases)):
            return device
    device_by_driver_name = find_device(key)
    if device_by_driver_name is None:
        raise UnknownHardwareError(_format_hint("GPU", key, devices))
    return device_by_driver_name


def link_by_key(key: str) -> Link:
    """Return the link with this key (`nvlink4`, `ib-400g`) or alias (`100gbe`).

    Raises:
        UnknownHardwareError: No link has that key.
    """
    links = load_hardware().links
    for link in links.values():
        if key.lower() in (link.key, *link.aliases):
            return link
    raise UnknownHardwareError(_format_hint("link", key, links))


def calibration_file_name(key: str) -> str:
    """Return the name of the file with this machine's measured constants for a device.

    The file lies in the folder of runs.
    """
    return f"calibration-{platform.node()}-{key}.json"


def _format_hint(kind: str, key: str, known: Mapping[str, object]) -> str:
    """Return the error sentence for an unknown key, with up to three similar keys, or with the file that lists all."""
    hint = suggest_names(key.lower(), known, f"src/parakit/config/{_FILE.name} lists all")
    return f"There is no {kind} '{key}'; {hint}"


def _split_key(key: str) -> frozenset[str]:
    """Return the words of a key in lower case, so that their order and separators do not matter."""
    return frozenset(re.split(r"[-_\s]+", key.casefold().strip()))


def _normalise_driver_name(name: str) -> str:
    """Return a driver's device name in lower case without the vendor."""
    return name.casefold().removeprefix("nvidia").strip()


def _convert_to_base_units(entry: Any) -> Any:
    """Convert an entry of the YAML file to bytes, bytes per second and seconds.

    The units are part of the keys, so the keys change too. Nested entries are converted as well.
    """
    if not isinstance(entry, dict):
        return entry
    converted = {}
    for name, value in entry.items():
        unit = _find_unit(name)
        if unit:
            base_unit, factor = _UNITS[unit]
            converted[name.removesuffix(unit) + base_unit] = value * factor
        else:
            converted[name] = _convert_to_base_units(value)
    return converted


def _find_unit(key: str) -> str:
    """Return the unit of `_UNITS` with which a key ends; empty if the key has no unit."""
    for unit in _UNITS:
        if key.endswith(unit):
            return unit
    return ""
