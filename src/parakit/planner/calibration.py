"""Constants that were measured on a machine, or that follow from what CALIBRATE= states.

`make calibrate` writes the measured ones to a file under the runs folder; plans for the same device read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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
_HOST = re.compile(r"\s*(?P<time>\d+\.?\d*)\s*ms\s+per\s+layer\s*", re.IGNORECASE)
_NUMBERS = ("rate", "rows", "columns", "inner")
_BISECTION_STEPS = 40
"""Number of halvings of the interval from 0 to 1, after which it is narrower than any measurement."""
_WITH_PRODUCTS = ("matmul_fp8", "attention")
"""Constants that change by the same factor as `matmul`, because the tensor cores' clock decides all of them."""


@dataclass(frozen=True)
class _StatedProduct:
    """A matrix product whose rate the user states in CALIBRATE=."""

    dtype: str
    rows: int
    columns: int
    inner: int
    """Size of the dimension over which the product sums."""
    rate: float
    """Floating-point operations per second."""


def load_calibration(path: Path | None) -> Calibration:
    """Read the calibration constants of a device from a JSON file. Without a file, return the defaults.

    The names in the file are the fields of `Calibration`. Fields that the file lacks have their defaults.

    Raises:
        RequestError: The file is missing, is not JSON, or has an unknown name.
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
    """Return the file with this machine's constants of a device, which `make plan GPU=<key>` reads too."""
    return runs / calibration_file_name(device.key)


def load_device_calibration(runs: Path, device: Device) -> Calibration:
    """Return the calibration constants of a device that were measured on this machine.

    Without such a measurement, the constants that the kit ships are returned. For CPU cores these are nominal.

    Raises:
        RequestError: The file is not what `make calibrate` wrote.
    """
    path = calibration_path(runs, device)
    if path.is_file():
        return load_calibration(path)
    nominal = "nominal ones of a CPU core; 'make calibrate' measures this machine's"
    return Calibration(source=nominal) if device.key == "cpu" else Calibration()


def calibrate_from_text(text: str, cluster: Cluster, dtype: str) -> Calibration:
    """Return a cluster's calibration constants, changed to what CALIBRATE= states.

    A rate of a matrix product sets the constant with which `product_seconds` gives the rate. The constant is a
    fraction of the device's peak. A stated product in the run's dtype changes the constants of attention and of fp8
    products by the same factor. A stated product in fp8 sets its own constant. A time per layer sets the host's
    constant.

    Args:
        text: Rates of products and a time per layer, with commas between them, such as `700 TFLOP/s on 4k x 4k x 4k in
            fp8, 3.5 ms per layer`. The sizes are rows, columns and inner dimension, and 1k is 1,024. A product
            without a dtype has the run's.
        cluster: The cluster.
        dtype: The run's dtype.

    Raises:
        RequestError: The text cannot be read, or no fraction of the device's peak makes a product so fast.
        NoPeakError: The device has no rate in its dtype.
    """
    products = []
    calibration = replace(cluster.calibration, source=f"'{text.strip()}', as CALIBRATE= states")
    for part in text.split(","):
        host = _HOST.fullmatch(part)
        if host is None:
            products.append(_parse_stated_product(part, dtype))
        else:
            calibration = replace(calibration, layer_launch_seconds=float(host["time"]) / 1e3)
    # Products in fp8 come last, because the time of their tiles depends on the rate of the other products.
    for product in sorted(products, key=lambda product: product.dtype == "fp8"):
        constants, name = cluster.constants, "matmul_fp8" if product.dtype == "fp8" else "matmul"
        calibrated = replace(cluster, calibration=calibration)
        fraction = _solve_peak_fraction(name, calibrated, dtype, product)
        changed: dict[str, Any] = {name: fraction}
        if name == "matmul":
            factor = fraction / constants.matmul
            changed |= {other: factor * getattr(constants, other) for other in _WITH_PRODUCTS}
        calibration = replace(calibration, **changed)
    return calibration


def _parse_stated_product(text: str, dtype: str) -> _StatedProduct:
    """Parse one product of CALIBRATE=, such as `700 TFLOP/s on 4k x 4k x 4k in fp8`.

    If the text states no dtype, the product has `dtype`, which is the dtype of the run.

    Raises:
        RequestError: The text has another form, or a number is 0.
    """
    match = _STATED.fullmatch(text)
    if match is None or not all(float(match[number]) for number in _NUMBERS):
        raise RequestError(
            f"CALIBRATE has '{text.strip()}', which is no rate of a product and no time of a step; write it as "
            '"700 TFLOP/s on 4096x4096x4096", with "in fp8" where it is, or as "200 ms on STRATEGY=tp8 MODEL=gpt3-13b".'
        )
    rows, columns, inner = (
        int(match[size]) * (1024 if match[size + "_k"] else 1)
        for size in ("rows", "columns", "inner")
    )
    rate = float(match["rate"]) * (1e15 if match["unit"] in "pP" else 1e12)
    return _StatedProduct((match["dtype"] or dtype).lower(), rows, columns, inner, rate)


def bisect_threshold(is_reached: Callable[[float], bool], limit: float) -> tuple[float, float]:
    """Return the two ends of the small interval in which a condition begins to hold, found by bisection.

    Args:
        is_reached: Function that is False below some value and True above it.
        limit: Upper end of the search, which begins at 0. The upper end stays there if the condition never holds.
    """
    low, high = 0.0, limit
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        if is_reached(middle):
            high = middle
        else:
            low = middle
    return low, high


def _solve_peak_fraction(name: str, cluster: Cluster, dtype: str, product: _StatedProduct) -> float:
    """Find by bisection the value of a calibration constant with which a matrix product gets its stated rate.

    The constant is a fraction of the device's peak rate.

    Args:
        name: Name of the constant, `matmul` or `matmul_fp8`.
        cluster: The cluster with all other constants.
        dtype: Dtype of the run.
        product: The product and its stated rate.

    Raises:
        RequestError: The stated rate is above the rate that `product_seconds` predicts for the full peak.
    """
    rows, columns, inner, rate = product.rows, product.columns, product.inner, product.rate
    stated_seconds = 2 * rows * columns * inner / rate
    recipe = Fp8Recipe.TENSORWISE if name == "matmul_fp8" else Fp8Recipe.NONE

    def is_fast_enough(fraction: float) -> bool:
        constant: dict[str, Any] = {name: fraction}
        tried_cluster = replace(cluster, calibration=replace(cluster.calibration, **constant))
        rates = compute_device_rates(tried_cluster, dtype, recipe)
        seconds = product_seconds(rows, inner, columns, 2, rates, quantized=bool(recipe))
        return seconds < stated_seconds

    low, high = bisect_threshold(is_fast_enough, 1.0)
    if low > 0.999:
        raise RequestError(
            f"CALIBRATE states {rate / 1e12:,.0f} TFLOP/s, which {cluster.device.name} cannot reach on "
            f"{rows:,} x {columns:,} x {inner:,}; correct the rate, its dtype or GPU=."
        )
    return high
