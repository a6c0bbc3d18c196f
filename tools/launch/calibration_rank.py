"""One rank of a calibration: what this device multiplies, moves and exchanges in a second.

`torchrun … -m tools.launch.calibration_rank cpu|cuda OUTPUT`: all ranks measure at once, because they
also train at once; rank 0 writes the slowest rank's figures.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS_EACH = 0.5
_COLLECTIVE_BYTES = 16 << 20
_SMALL_CALLS = 200
_PRODUCTS = 4
"""Of 256 x 256 matrices: arithmetic of about half a millisecond on a core."""
_LEAST_LATENCY_SECONDS = 1e-6


def main(device: str, output: Path) -> None:
    """Measure and write."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    figures = {
        "matmul_flops": _matmul_flops(device),
        "attention_flops": _attention_flops(device),
        "bytes_per_second": _elementwise_bytes_per_second(device),
        "layer_seconds": _layer_seconds(device),
    }
    if dist.get_world_size() > 1:
        figures |= _link(device)
    gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, figures)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(_slowest(gathered)))
    dist.destroy_process_group()


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    pick = {name: max if name.endswith("_seconds") else min for name in ranks[0]}
    return {name: pick[name](rank[name] for rank in ranks) for name in ranks[0]}


def _least_seconds(device: str, work: Callable[[], object]) -> float:
    """Least time of one call, over calls that take about half a second together: others may be busy."""
    work()
    times: list[float] = []
    while len(times) < 3 or sum(times) < SECONDS_EACH:
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _matmul_flops(device: str) -> float:
    size = 8192 if device == "cuda" else 1024
    left = torch.randn(size, size, device=device, dtype=_dtype(device))
    return 2 * size**3 / _least_seconds(device, lambda: left @ left)


def _attention_flops(device: str) -> float:
    """Forward and backward of SDPA, causal on a GPU, whose kernels skip what is masked."""
    heads, length, width = (32, 2048, 128) if device == "cuda" else (8, 256, 64)
    shape = (1, heads, length, width)
    query = torch.randn(shape, device=device, dtype=_dtype(device), requires_grad=True)
    causal = device == "cuda"

    def work() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, query, query, is_causal=causal
        )
        out.sum().backward()  # type: ignore[no-untyped-call]

    products = 3 * 4 * heads * length * length * width
    return (products / 2 if causal else products) / _least_seconds(device, work)


def _elementwise_bytes_per_second(device: str) -> float:
    """Read one tensor, write another: a copy, of more than the caches hold."""
    elements = (1 << 28) if device == "cuda" else (1 << 24)
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return 8 * elements / _least_seconds(device, lambda: target.copy_(source))


def _layer_seconds(device: str) -> float:
    """A transformer layer of almost no work, forward and backward: what launching its kernels costs."""
    layer = torch.nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0.0, norm_first=True, device=device, dtype=_dtype(device)
    )
    token = torch.randn(2, 1, 16, device=device, dtype=_dtype(device))

    def work() -> None:
        layer(token).sum().backward()

    return _least_seconds(device, work)


def _link(device: str) -> dict[str, float]:
    """Rate of a large all-reduce by its ring bytes, and what a small one costs between arithmetic."""
    ranks = dist.get_world_size()
    large = torch.zeros(_COLLECTIVE_BYTES // 4, device=device)
    small = torch.zeros(1, device=device)
    work = torch.randn(256, 256, device=device)

    def compute() -> None:
        for _ in range(_PRODUCTS):
            work @ work

    def compute_and_meet() -> None:
        compute()
        dist.all_reduce(small)

    # Every rank must make the same number of calls, so these are counted, not timed out.
    large_seconds = min(_each_seconds(device, lambda: dist.all_reduce(large), 10))
    # Ranks never arrive together: in training, too, a call takes the wait for the slower one.
    together = statistics.mean(_each_seconds(device, compute_and_meet, _SMALL_CALLS))
    alone = statistics.mean(_each_seconds(device, compute, _SMALL_CALLS))
    return {
        "link_bytes_per_second": 2 * (ranks - 1) / ranks * _COLLECTIVE_BYTES / large_seconds,
        "link_latency_seconds": max(together - alone, _LEAST_LATENCY_SECONDS),
    }


def _each_seconds(device: str, work: Callable[[], object], calls: int) -> list[float]:
    """Time of each call, but for the first two."""
    times = []
    for _ in range(calls + 2):
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return times[2:]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
