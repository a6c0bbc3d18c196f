"""Constants that were measured on a machine: where they are kept, and what a plan takes of them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from tools.plan.options import RequestError
from tools.plan.time.cluster import Calibration
from tools.spec.hardware import Device, calibration_file


def load_calibration(path: Path | None) -> Calibration:
    """Measured constants from a JSON file with the names of `Calibration`; without one, the defaults.

    Raises:
        RequestError: The file is missing, is not JSON, or has a name that is not known.
    """
    if path is None:
        return Calibration()
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"The calibration {path} cannot be read: {error}.") from None
    known = {field.name for field in fields(Calibration)}
    if not isinstance(values, dict) or not set(values) <= known:
        raise RequestError(
            f"The calibration {path} may hold {', '.join(sorted(known))} and no more."
        )
    return Calibration(**{"source": str(path), **values})


def calibration_path(runs: Path, device: Device) -> Path:
    """Where this machine's constants for a device are kept; `make plan GPU=<key>` looks there too."""
    return runs / calibration_file(device.key)


def calibration_of(runs: Path, device: Device) -> Calibration:
    """What was measured of a device on this machine; without that, what is shipped.

    Raises:
        RequestError: The file is not what `make calibrate` wrote.
    """
    kept = calibration_path(runs, device)
    if kept.is_file():
        return load_calibration(kept)
    nominal = "nominal ones of a CPU core; 'make calibrate' measures this machine's"
    return Calibration(source=nominal) if device.key == "cpu" else Calibration()
