"""One rank of a microbenchmark: `[torchrun …] -m parakit.launch.microbenchmark_rank cpu|gpu OUTPUT JSON`.

The JSON is a `Workload`; rank 0 writes `Figures` to OUTPUT. Collectives are NCCL's on GPUs and gloo's
on CPU ranks. Local measurements end by the clock; collectives are counted, because every rank must make
the same number of calls.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

# AdamW imports it too. Its functions' defaults keep the group that exists then: gloo's threads would
# outlive `destroy_process_group` and abort the process at its end (pytorch/pytorch#190489).
import torch.distributed.nn.functional

from parakit.config.run import DeviceKind, Transport
from parakit.costs import Operation, wire_bytes
from parakit.launch.microbenchmark import Figures, Workload, attention_flops

LARGE_CALLS, SMALL_CALLS = 5, 60
SPREAD_CALLS = 20
WARM_UP_COLLECTIVES = 3
SMALL_BYTES = 1 << 17
PRODUCTS = 4
"""Of 256 x 256 matrices, before each small all-reduce: about half a millisecond on a core."""
LEAST_LATENCY_SECONDS = 1e-6
OTHER_BYTES = 64 << 20
"""What training writes between two micro batches' logits, which no cache then holds: weights,
gradients and activations of the layers."""

Work = Callable[[], object]
FiguresByName = dict[str, float | None]


def main(kind: DeviceKind, output: Path, workload: Workload) -> None:
    """Measure; rank 0 writes the slowest rank's figures."""
    device = "cuda" if kind is DeviceKind.GPU else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_torchelastic_launched():
        alone = [asdict(measure_local_figures(workload, device)) for _ in range(workload.rounds)]
        output.write_bytes(msgspec.json.encode(median_figures(alone)))
        return
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mine = median_figures([_round(workload, device) for _ in range(workload.rounds)])
    ranks: list[FiguresByName] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    pairs = _pairs(workload, device) if workload.node_pairs else {}
    if dist.get_rank() == 0:
        output.write_bytes(msgspec.json.encode(slowest_figures(ranks) | pairs))
    dist.destroy_process_group()


def _round(workload: Workload, device: str) -> FiguresByName:
    dist.barrier()  # All at once, as they train: cores share memory.
    own = measure_local_figures(workload, device)
    spread = _spread(workload, device) if workload.spread else {}
    return asdict(own) | _collective_figures(workload, device) | spread


def measure_local_figures(workload: Workload, device: str) -> Figures:
    """Rates of this rank's device, without communication."""
    timer = _Timer(workload, device)
    flops = _matmul(timer, workload.matmul_size) if workload.matmul_size else None
    head = workload.head
    elements = workload.parameters
    return Figures(
        matmul_flops=flops,
        attention_flops=(
            _attention(timer, *workload.attention_shape) if workload.attention_shape else None
        ),
        copy_bytes_per_second=_copy(timer, workload.copy_bytes) if workload.copy_bytes else None,
        layer_seconds=_layer(timer) if workload.layer else None,
        logit_seconds=_head(timer, *head, flops) if head and flops else None,
        parameter_seconds=_update(timer, elements) / elements if elements else None,
        tensor_seconds=_update(timer, 1) if elements else None,
        gradient_seconds=_table_gradient(timer, workload.table) if workload.table else None,
    )


def median_figures(rounds: list[FiguresByName]) -> FiguresByName:
    """Of each figure the median of the rounds."""
    return {name: statistics.median(values) for name, values in _join_by_name(rounds)}


def slowest_figures(ranks: list[FiguresByName]) -> FiguresByName:
    """Of each figure the longest time or the least rate among the ranks."""
    return {
        name: (max if name.endswith("_seconds") else min)(values)
        for name, values in _join_by_name(ranks)
    }


def _join_by_name(parts: list[FiguresByName]) -> Iterator[tuple[str, list[float]]]:
    for name in (field.name for field in fields(Figures)):
        values = [value for part in parts if isinstance(value := part.get(name), float)]
        if values:
            yield name, values


def pair_neighbouring_nodes(leaders: list[int]) -> list[tuple[int, int]]:
    """Each node's first rank with the next node's, around the ring; two nodes are one pair."""
    if len(leaders) < 2:
        return []
    after = [*leaders[1:], leaders[0]]
    return list(zip(leaders, after, strict=True))[: len(leaders) if len(leaders) > 2 else 1]


class _Timer:
    """Seconds of a call, the way a workload asks for them."""

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def seconds(self, work: Work, before: Work | None = None) -> float:
        """Over calls that take `seconds_each` together, at least three; `before` each is not timed."""
        for _ in range(self.workload.warm_up_calls):
            work()
        times: list[float] = []
        while len(times) < 3 or sum(times) < self.workload.seconds_each:
            if before:
                before()
            times.append(time_call(work, self.device, time.process_time))
        return self.typical(times)

    def typical(self, times: list[float]) -> float:
        """Of calls, the one that the workload asks for."""
        return statistics.mean(times) if self.workload.mean else min(times)


def time_call(work: Work, device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """One call, until the device has finished it.

    On a CPU by `clock`: of a rank's own work processor time, which other processes and ranks on the same
    core add nothing to but what they take of caches and memory.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
    began = clock()
    work()
    return clock() - began


def _matmul(timer: _Timer, size: int) -> float:
    left, right = (
        torch.randn(size, size, device=timer.device, dtype=timer.dtype) for _ in range(2)
    )
    out = torch.empty_like(left)
    return 2 * size**3 / timer.seconds(lambda: torch.mm(left, right, out=out))


def _attention(timer: _Timer, heads: int, length: int, width: int) -> float:
    """Forward and backward of SDPA, causal on a GPU, whose kernels skip what is masked."""
    causal = timer.device == "cuda"
    query = torch.randn(
        (1, heads, length, width), device=timer.device, dtype=timer.dtype, requires_grad=True
    )

    def work() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, query, query, is_causal=causal
        )
        out.sum().backward()  # type: ignore[no-untyped-call]

    return attention_flops((heads, length, width), causal) / timer.seconds(work)


def _copy(timer: _Timer, size_bytes: int) -> float:
    source = torch.randn(size_bytes // 4, device=timer.device)
    return 2 * size_bytes / timer.seconds(source.clone)


def _layer(timer: _Timer) -> float:
    layer = torch.nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0.0, norm_first=True, device=timer.device, dtype=timer.dtype
    )
    token = torch.randn(2, 1, 16, device=timer.device, dtype=timer.dtype)
    return timer.seconds(lambda: layer(token).sum().backward())


def _head(timer: _Timer, tokens: int, width: int, vocabulary: int, flops: float) -> float:
    """An output layer and its cross entropy, in place where training works in place: seconds a logit."""
    normal = partial(torch.randn, device=timer.device, dtype=timer.dtype)
    hidden, weight = normal(tokens, width), 0.02 * normal(vocabulary, width)
    row = torch.arange(tokens, device=timer.device)

    def work() -> None:
        logits = hidden @ weight.t()
        logits.sub_(torch.max(logits, dim=-1)[0].unsqueeze(-1))
        chosen = logits[row, row]
        total = torch.exp(logits, out=logits).sum(dim=-1, keepdim=True)
        logits.div_(total)
        logits[row, row] -= 1.0
        logits.mul_(torch.log(total) - chosen.unsqueeze(-1))
        logits @ weight
        logits.t() @ hidden

    products = 6 * tokens * width * vocabulary / flops
    seconds = timer.seconds(work, before=_other_work(timer))
    return max(0.0, seconds - products) / (tokens * vocabulary)


def _update(timer: _Timer, elements: int) -> float:
    """What happens to a tensor's gradient between backward and the next forward, in fp32, unfused."""
    weight = torch.nn.Parameter(torch.zeros(elements, device=timer.device))
    weight.grad, arrived = torch.zeros_like(weight), torch.ones_like(weight)
    adam = torch.optim.AdamW([weight], lr=1e-6)

    def work() -> None:
        assert weight.grad is not None
        weight.grad.zero_()
        weight.grad.add_(arrived)
        norm = torch.linalg.vector_norm(weight.grad, dtype=torch.float64)
        weight.grad.copy_(weight.grad * (1.0 / (1.0 + norm)).float())
        adam.step()

    return timer.seconds(work)


def _table_gradient(timer: _Timer, elements: int) -> float:
    """A look-up's gradient is as large as the table, and added to the micro batches' before."""
    summed = torch.zeros(elements, device=timer.device)
    work: Work = lambda: summed.add_(torch.zeros_like(summed))  # noqa: E731
    return timer.seconds(work, before=_other_work(timer)) / elements


def _other_work(timer: _Timer) -> Work:
    others = torch.zeros(OTHER_BYTES // 4, device=timer.device)
    return lambda: others.add_(1.0)


def _collective_figures(workload: Workload, device: str) -> dict[str, float]:
    found: dict[str, float] = {}
    ranks, typical = dist.get_world_size(), _Timer(workload, device).typical
    if workload.all_reduce_bytes:
        whole = torch.zeros(workload.all_reduce_bytes // 4, device=device)
        works: dict[Operation, Work] = {Operation.ALL_REDUCE: lambda: dist.all_reduce(whole)}
        if workload.other_collectives:
            part, arrived = torch.zeros_like(whole[: len(whole) // ranks]), torch.zeros_like(whole)
            works |= {
                Operation.REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, whole),
                Operation.ALL_GATHER: lambda: dist.all_gather_into_tensor(whole, part),
                Operation.ALL_TO_ALL: lambda: dist.all_to_all_single(arrived, whole),
            }
        found = {
            f"{operation}_bytes_per_second": _rate(operation, work, whole, ranks, typical)
            for operation, work in works.items()
        }
    if workload.latency:
        rate = found.get("all_reduce_bytes_per_second")
        found["all_reduce_latency_seconds"] = _latency(device, rate)
    return found


def _rate(
    operation: Operation,
    work: Work,
    whole: torch.Tensor,
    ranks: int,
    typical: Callable[[list[float]], float] = min,
) -> float:
    """Bytes that a rank puts on the wire for it, which gloo does as NCCL but for a reduce-scatter."""
    sent = wire_bytes(operation, whole.nbytes, ranks, Transport.GLOO)
    return sent / typical(_counted(work, whole.device.type, LARGE_CALLS))


def _latency(device: str, bytes_per_second: float | None) -> float:
    """What a tensor of a layer's size takes beyond its bytes at the rate of large ones."""
    small = torch.zeros(SMALL_BYTES // 4, device=device)
    sent = wire_bytes(Operation.ALL_REDUCE, SMALL_BYTES, dist.get_world_size())
    moving = sent / bytes_per_second if bytes_per_second else 0.0
    matrix = torch.randn(256, 256, device=device)

    def compute() -> None:
        for _ in range(PRODUCTS):
            matrix @ matrix

    def compute_and_reduce() -> None:
        compute()
        dist.all_reduce(small)

    together, alone = (
        _counted(work, device, SMALL_CALLS) for work in (compute_and_reduce, compute)
    )
    return max(added_seconds(together, alone) - moving, LEAST_LATENCY_SECONDS)


def added_seconds(together: list[float], alone: list[float]) -> float:
    """Mean time of calls with a wait beyond that of calls without.

    Neither the least nor the median: an iteration is the sum of its calls, and of those over gloo one in
    five waits for more than 1.5 ms, often all ranks at once, until a thread of gloo's gets a core.
    """
    return statistics.mean(together) - statistics.mean(alone)


def _spread(workload: Workload, device: str) -> dict[str, float]:
    """How far ranks that have a core each are apart when they do the same work: nothing of one rank.

    Pieces are about as long as those between two calls in training, and not aligned by anything.
    """
    times: list[float] = []
    dist.barrier()
    # Of more ranks than cores so many have one.
    if device == "cuda" or int(os.environ["LOCAL_RANK"]) < len(os.sched_getaffinity(0)):
        timer = _Timer(workload, device)
        others, matrix = _other_work(timer), torch.randn(512, 512, device=device)

        def piece() -> None:
            others()
            for _ in range(PRODUCTS):
                matrix @ matrix

        times = _counted(piece, device, SPREAD_CALLS)
    ranks: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(ranks, times)
    at_once = list(zip(*filter(None, ranks), strict=True))
    if len(at_once[0]) < 2:
        return {}
    longest, mean = (sum(map(of, at_once)) for of in (max, statistics.mean))
    return {"jitter": (longest / mean - 1) / math.sqrt(2 * math.log(len(at_once[0])))}


def _counted(work: Work, device: str, calls: int) -> list[float]:
    for _ in range(WARM_UP_COLLECTIVES):
        work()
    return [time_call(work, device) for _ in range(calls)]


def _pairs(workload: Workload, device: str) -> dict[str, list[str] | list[float]]:
    """Names of the nodes, and the rate of each with the next while all others wait."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    leaders = list(range(0, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])))
    tensor = torch.zeros((workload.all_reduce_bytes or 0) // 4, device=device)
    return {
        "nodes": [names[leader] for leader in leaders],
        "pair_bytes_per_second": [
            _pair(tensor, *pair) for pair in pair_neighbouring_nodes(leaders)
        ],
    }


def _pair(tensor: torch.Tensor, one: int, other: int) -> float:
    group = dist.new_group([one, other])
    rate = torch.zeros(1, device=tensor.device)
    if isinstance(group, dist.ProcessGroup):  # Outsiders are given a placeholder.
        work: Work = lambda: dist.all_reduce(tensor, group=group)  # noqa: E731
        rate[0] = _rate(Operation.ALL_REDUCE, work, tensor, 2)
    dist.all_reduce(rate, op=dist.ReduceOp.MAX)
    return float(rate)


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[3], type=Workload)
    main(DeviceKind(sys.argv[1]), Path(sys.argv[2]), asked)
