"""One rank of the exchange: `torchrun … -m tools.launch.probe.exchange_rank cpu|cuda OUTPUT`.

All ranks all-reduce one large tensor; then each node with the next one alone, so that a slow link shows
between which nodes it is. GPUs multiply first, for their clocks to rise. Rank 0 writes the figures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
CALLS = 10
WARM_UP = 3
LOAD_SECONDS = 2.0


def main(device: str, output: Path) -> None:
    """Measure and write `{"all": bytes a second, "nodes": [names], "pairs": [bytes a second]}`."""
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        _work()
    tensor = torch.zeros(BYTES[device] // 4, device=device)
    ranks_a_node = int(os.environ["LOCAL_WORLD_SIZE"])
    leaders = list(range(0, dist.get_world_size(), ranks_a_node))
    figures = {"all": ring_rate(tensor, None, dist.get_world_size())}
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    pairs = [_pair(tensor, one, other) for one, other in neighbours(leaders)]
    if dist.get_rank() == 0:
        told = {**figures, "nodes": [names[leader] for leader in leaders], "pairs": pairs}
        output.write_text(json.dumps(told))
    dist.destroy_process_group()


def neighbours(leaders: list[int]) -> list[tuple[int, int]]:
    """Each node's first rank with the next node's, around the ring; two nodes are one pair."""
    if len(leaders) < 2:
        return []
    after = [*leaders[1:], leaders[0]]
    return list(zip(leaders, after, strict=True))[: len(leaders) if len(leaders) > 2 else 1]


def ring_rate(tensor: torch.Tensor, group: dist.ProcessGroup | None, ranks: int) -> float:
    """Bytes a second that a rank sends in a ring all-reduce: 2(n-1)/n of the tensor; the best call."""
    least = float("inf")
    for call in range(WARM_UP + CALLS):
        _synchronize(tensor)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        _synchronize(tensor)
        if call >= WARM_UP:
            least = min(least, time.perf_counter() - began)
    return 2 * (ranks - 1) / ranks * tensor.nbytes / least


def _pair(tensor: torch.Tensor, one: int, other: int) -> float:
    """The rate between two ranks while all others wait, as rank 0 knows it too."""
    group = dist.new_group([one, other])
    rate = torch.zeros(1, device=tensor.device)
    if isinstance(group, dist.ProcessGroup):  # Outsiders are given a placeholder.
        rate[0] = ring_rate(tensor, group, 2)
    dist.all_reduce(rate, op=dist.ReduceOp.MAX)
    return float(rate)


def _work() -> None:
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.perf_counter() + LOAD_SECONDS
    while time.perf_counter() < until:
        matrix @ matrix
        torch.cuda.synchronize()


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
