"""Constants that were measured on a machine: where they are kept, and what a plan takes of them; and
those that a stated rate of one matrix product implies."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from parakit.config.hardware import Device, calibration_file_name
from parakit.config.run import Fp8Recipe
from parakit.planner.options import RequestError
from parakit.planner.time.cluster import Calibration, Cluster
from parakit.planner.time.compute import product_seconds
from parakit.planner.time.rates import compute_device_rates

_STATED = re.compile(
    r"\s*(?P<rate>\d+\.?\d*)\s*(?P<unit>[TP])FLOPS?(?:/s)?\s+on\s+"
    r"(?P<rows>\d+)(?P<rows_k>k?)\s*[x×]\s*(?P<columns>\d+)(?P<columns_k>k?)\s*[x×]\s*"
    r"(?P<inner>\d+)(?P<inner_k>k?)"
    r"(?:\s+in\s+(?P<dtype>bf16|fp16|fp8))?\s*",
    re.IGNORECASE,
)
_NUMBERS = ("rate", "rows", "columns", "inner")
_WITH_PRODUCTS = ("matmul_fp8", "attention")
"""What the tensor cores' clock decides too: a product that is slower than usual slows these as much."""


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
    return runs / calibration_file_name(device.key)


def load_device_calibration(runs: Path, device: Device) -> Calibration:
    """What was measured of a device on this machine; without that, what is shipped.

    Raises:
        RequestError: The file is not what `make calibrate` wrote.
    """
    kept = calibration_path(runs, device)
    if kept.is_file():
        return load_calibration(kept)
    nominal = "nominal ones of a CPU core; 'make calibrate' measures this machine's"
    return Calibration(source=nominal) if device.key == "cpu" else Calibration()


def calibrate_from_stated_products(text: str, cluster: Cluster, dtype: str) -> Calibration:
    """The cluster's constants with those that stated products imply (`CALIBRATE=`).

    The text is one product, or several with commas between: `700 TFLOP/s on 4k x 4k x 4k in fp8`: rows,
    columns and inner dimension, 1k being 1,024; in the run's dtype if no other is said.

    The share of the peak is found with which `product_seconds` gives the stated rate. A product in the
    run's dtype changes attention and fp8 products by the same factor, but for what is stated itself.

    Raises:
        RequestError: It cannot be read, or no share of the device's peak makes a product so fast.
        NoPeakError: The device has no rate in its dtype.
    """
    products = []
    for each in text.split(","):
        stated = _STATED.fullmatch(each)
        if stated is None or not all(float(stated[number]) for number in _NUMBERS):
            raise RequestError(
                f"CALIBRATE has '{each.strip()}', which is no rate of a product; write it as "
                '"700 TFLOP/s on 4096x4096x4096", with "in fp8" where it is.'
            )
        products.append(((stated["dtype"] or dtype).lower(), stated))
    found = replace(cluster.calibration, source=f"'{text.strip()}', as CALIBRATE= states")
    # Last those in fp8: what their tiles cost beside arithmetic follows from the others' rate.
    for kind, stated in sorted(products, key=lambda each: each[0] == "fp8"):
        constants, name = cluster.constants, "matmul_fp8" if kind == "fp8" else "matmul"
        share = _share_of_peak(name, replace(cluster, calibration=found), dtype, stated)
        changed: dict[str, Any] = {name: share}
        if name == "matmul":
            factor = share / constants.matmul
            changed |= {other: factor * getattr(constants, other) for other in _WITH_PRODUCTS}
        found = replace(found, **changed)
    return found


def _share_of_peak(name: str, cluster: Cluster, dtype: str, stated: re.Match[str]) -> float:
    """With which the stated product has its rate."""
    rows, columns, inner = (
        int(stated[size]) * (1024 if stated[size + "_k"] else 1)
        for size in ("rows", "columns", "inner")
    )
    rate = float(stated["rate"]) * (1e15 if stated["unit"] in "pP" else 1e12)
    recipe = Fp8Recipe.TENSORWISE if name == "matmul_fp8" else Fp8Recipe.NONE
    low, high = 0.0, 1.0
    for _ in range(40):
        known: dict[str, Any] = {name: (low + high) / 2}
        tried = replace(cluster, calibration=replace(cluster.calibration, **known))
        reached = compute_device_rates(tried, dtype, recipe)
        seconds = product_seconds(rows, inner, columns, 2, reached, 1, bool(recipe))
        quick = seconds < 2 * rows * columns * inner / rate
        low, high = (low, known[name]) if quick else (known[name], high)
    if low > 0.999:
        raise RequestError(
            f"CALIBRATE states {rate / 1e12:,.0f} TFLOP/s, which {cluster.device.name} cannot reach on "
            f"{rows:,} x {columns:,} x {inner:,}; correct the rate, its dtype or GPU=."
        )
    return high
