"""What the device reaches at best: `python -m tools.launch.bench_gpu.ceilings OUTPUT`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

SIZE = 16384
"""Rows and columns of the product: 8.8e12 FLOP, a few hundredths of a second."""
ELEMENTS = 1 << 31
"""Of 2 bytes: 4 GiB read and 4 GiB written, far beyond any cache."""
SECONDS_EACH = 4.0
WARM_UP = 5


def matmul_flops(size: int, device: str) -> float:
    """FLOP/s of a bf16 product of square matrices of random normal numbers: the median of calls.

    The numbers count: with zeros a GPU takes less power, and clocks higher than in training.
    """
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / _median_seconds(lambda: torch.mm(left, right, out=out), device)


def copy_bytes_per_second(elements: int, device: str) -> float:
    """Bytes read and written in a second by a copy of 16-bit numbers: the median of calls."""
    source = torch.ones(elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 4 * elements / _median_seconds(lambda: target.copy_(source), device)


def main(output: Path, device: str = "cuda", size: int = SIZE, elements: int = ELEMENTS) -> None:
    """Measure and write."""
    figures = {
        "matmul_flops": matmul_flops(size, device),
        "copy_bytes_per_second": copy_bytes_per_second(elements, device),
    }
    output.write_text(json.dumps(figures))


def _median_seconds(work: Callable[[], object], device: str) -> float:
    """Of single calls over several seconds, so that the clocks settle as they do in training."""
    for _ in range(WARM_UP):
        work()
    clock = _cuda_seconds if device == "cuda" else _host_seconds
    found: list[float] = []
    while len(found) < 3 or sum(found) < SECONDS_EACH:
        found.append(clock(work))
    return statistics.median(found)


def _cuda_seconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _host_seconds(work: Callable[[], object]) -> float:
    import time

    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(Path(sys.argv[1]))
