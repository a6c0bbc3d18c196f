"""The GPU that a foreign log names: `nvidia-smi`'s table or a trainer's own line at its beginning."""

from __future__ import annotations

import re
from functools import cache
from itertools import islice
from pathlib import Path

from tools.report.read.lines import read_lines
from tools.spec.hardware import load_hardware

_LINES = 5000
"""From the beginning on; a device is named before training."""


def device_named(path: Path) -> str:
    """The driver's name of the device; empty where the log names none, or several.

    Raises:
        OSError: The file cannot be read.
    """
    names, pattern = _names()
    found = {
        names[match.casefold()]
        for line in islice(read_lines(path), _LINES)
        for match in pattern.findall(line)
    }
    return found.pop() if len(found) == 1 else ""


@cache
def _names() -> tuple[dict[str, str], re.Pattern[str]]:
    """Every known name by its lower case, and what finds them, longer names first."""
    devices = load_hardware().devices.values()
    names = {
        name.casefold(): device.nvml_names[0] for device in devices for name in device.nvml_names
    }
    gpus = sorted((name for name in names if name.startswith("nvidia")), key=len, reverse=True)
    return names, re.compile(rf"(?:{'|'.join(map(re.escape, gpus))})(?![\w-])", re.IGNORECASE)
