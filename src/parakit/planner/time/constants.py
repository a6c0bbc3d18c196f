"""What kernels, links and hosts reach of their datasheets: a dozen constants a generation of devices.

`constants.yaml` holds them, as `python -m parakit validate --fit` wrote them, with their bounds and
the readings that made them. None belongs to a source, a model or a layout.
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
    """One set, for every configuration on devices of one generation."""

    matmul: float
    """Of the dense peak, by a very large matrix product whose operands cost nothing to read."""
    matmul_fp8: float
    """The same of the peak in eight or four bits."""
    product_fill: float
    """Inner dimension that takes as long as what a tile of a product does before and after it: filling
    the pipeline and writing the result. The rate falls by 1 + fill/inner."""
    attention: float
    """Of the dense peak, by fused attention on heads 128 wide, forward and backward together."""
    memory: float
    """Of the memory bandwidth, by elementwise kernels and by operands of matrix products."""
    layer_launch_seconds: float
    """Least time of one layer, forward and backward: the host launches about a hundred kernels."""
    call_launch_seconds: float
    """What each collective call adds to that."""
    link: float
    """Of the link rate, by large collectives and messages."""
    hop_seconds: float
    """Of one step of a collective inside a node."""
    network_hop_seconds: float
    """Of one step between nodes."""
    contention: float
    """Of the time of communication hidden behind arithmetic, lost because it takes SMs and memory
    bandwidth from it."""
    jitter: float
    """Standard deviation of a device's time, as a share: all wait for the slowest of n, which lies about
    sqrt(2 ln n) deviations out."""


CONSTANT_NAMES = tuple(field.name for field in fields(Constants))


@cache
def load_constants(generation: str, without: str = "") -> Constants:
    """The constants of a generation; one that was never fitted borrows those it names.

    Args:
        generation: As in `Device.generation`.
        without: A source of readings: the constants are those fitted with it left out.
    """
    data = _file()
    entry = data["generations"][generation]
    while "borrows" in entry:
        generation = entry["borrows"]
        entry = data["generations"][generation]
    left_out = data.get("left_out", {}).get(generation, {})
    entry = left_out.get(without, entry)
    return Constants(**{name: float(entry[name]) for name in CONSTANT_NAMES})


@cache
def _file() -> dict[str, Any]:
    return dict(read_yaml(CONSTANTS_FILE))
