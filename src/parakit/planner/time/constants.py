"""Fractions of their datasheets that kernels, links and hosts reach: a dozen constants per generation of devices.

`constants.yaml` holds the constants with their bounds and the published measurements that they were fitted to, as
`python -m parakit validate --fit` wrote them. No constant belongs to a source, a model or a strategy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from parakit.config.files import read_yaml

CONSTANTS_FILE = Path(__file__).with_name("constants.yaml")


@dataclass(frozen=True)
class Constants:
    """Constants of the time model for one generation of devices. They are the same for all configurations."""

    matmul: float
    """Fraction of the dense peak that a very large matrix product reaches if its operands cost nothing to read."""
    matmul_fp8: float
    """Fraction of the peak in eight or four bits that such a product reaches."""
    product_fill: float
    """Inner dimension that takes as long as start and end of a product's tile, which fill the pipeline and write the
    result. The rate falls by 1 + fill/inner."""
    attention: float
    """Fraction of the dense peak that fused attention reaches on heads 128 wide, forward and backward together."""
    memory: float
    """Fraction of the memory bandwidth that elementwise kernels and operands of matrix products reach."""
    layer_launch_seconds: float
    """Least time of one layer, forward and backward: the host launches about a hundred kernels."""
    call_launch_seconds: float
    """Further launch time per collective call."""
    link: float
    """Fraction of the link rate that large collectives and messages reach."""
    hop_seconds: float
    """Latency of one step of a collective inside a node."""
    network_hop_seconds: float
    """Latency of one step between nodes."""
    contention: float
    """Fraction of overlapped communication's time by which computation slows down, because communication takes SMs and
    memory bandwidth."""
    jitter: float
    """Standard deviation of a device's time, as a fraction of the time. All devices wait for the slowest of n, which
    lies about sqrt(2 ln n) deviations above the mean."""


CONSTANT_NAMES = tuple(field.name for field in fields(Constants))


@cache
def load_constants(generation: str, without: str = "") -> Constants:
    """Return the constants of a generation of devices.

    The entry of a generation that was never fitted may name another generation (`borrows`). The constants of that
    generation are then returned.

    Args:
        generation: Name of the generation, as in `Device.generation`.
        without: Source of published measurements to leave out of the fit. If there is no fit without the source, the
            constants are those of the full fit.
    """
    data = _read_constants_file()
    entry = data["generations"][generation]
    while "borrows" in entry:
        generation = entry["borrows"]
        entry = data["generations"][generation]
    fits_without = data.get("left_out", {}).get(generation, {})
    entry = fits_without.get(without, entry)
    return Constants(**{name: float(entry[name]) for name in CONSTANT_NAMES})


@cache
def _read_constants_file() -> dict[str, Any]:
    """Return the content of `constants.yaml`."""
    return dict(read_yaml(CONSTANTS_FILE))
