"""One rank of a microbenchmark: `[torchrun …] -m parakit.launch.microbenchmark_rank cpu|gpu OUTPUT JSON`.

The JSON is a `Workload`, and rank 0 writes `Figures` to OUTPUT. Collectives are NCCL's on GPUs and gloo's
on CPU ranks. Measurements of one device repeat for a given time. Collectives repeat a given number of
times, because every rank must make the same number of calls.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

# AdamW imports this module too. Default arguments of its functions hold the process group that exists at
# import. If that were a gloo group, its threads would outlive `destroy_process_group` and abort the process
# at its end (pytorch/pytorch#190489).
import torch.distributed.nn.functional

from parakit.config.run import DeviceKind, Transport
from parakit.costs import Operation, wire_bytes
from parakit.launch.microbenchmark import Figures, Workload, attention_flops

LARGE_CALLS, SMALL_CALLS = 5, 60
SPREAD_CALLS = 20
WARM_UP_COLLECTIVES = 3
SMALL_BYTES = 1 << 17
PRODUCTS = 4
"""Products of 256 x 256 matrices before each small all-reduce: about half a millisecond on a core."""
LEAST_LATENCY_SECONDS = 1e-6
OTHER_BYTES = 64 << 20
"""Bytes that stand for what training writes between the logits of two micro batches: weights, gradients and
activations. They displace the logits from every cache.
"""

Work = Callable[[], object]
FiguresByName = dict[str, float | None]


def main(kind: DeviceKind, output: Path, workload: Workload) -> None:
    """Measure a workload on this rank; rank 0 writes the slowest rank's figures to `output`."""
    device = "cuda" if kind is DeviceKind.GPU else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    figures: dict[str, Any]
    if not dist.is_torchelastic_launched():
        # A single rank has no process group.
        rounds = [asdict(measure_local_figures(workload, device)) for _ in range(workload.rounds)]
        figures = median_figures(rounds)
        output.write_bytes(msgspec.json.encode(figures))
        return
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rounds = [_measure_round(workload, device) for _ in range(workload.rounds)]
    figures_by_rank: list[FiguresByName] = [{}] * dist.get_world_size()
    dist.all_gather_object(figures_by_rank, median_figures(rounds))
    figures = dict(slowest_figures(figures_by_rank))
    if workload.node_pairs:
        figures |= _measure_pairs(workload, device)
    if dist.get_rank() == 0:
        output.write_bytes(msgspec.json.encode(figures))
    dist.destroy_process_group()


def _measure_round(workload: Workload, device: str) -> FiguresByName:
    """Return all figures of this rank from one round of measurements."""
    # All ranks measure at once, as they train at once, because cores share the memory's bandwidth.
    dist.barrier()
    local = asdict(measure_local_figures(workload, device))
    spread = _measure_jitter(workload, device) if workload.spread else {}
    return local | _measure_collectives(workload, device) | spread


def measure_local_figures(workload: Workload, device: str) -> Figures:
    """Return the figures of this rank's device that need no communication."""
    timer = _Timer(workload, device)
    figures = Figures()
    if workload.matmul_size:
        flops = _measure_matmul_flops(timer, workload.matmul_size)
        figures = replace(figures, matmul_flops=flops)
    if workload.attention_shape:
        flops = _measure_attention_flops(timer, *workload.attention_shape)
        figures = replace(figures, attention_flops=flops)
    if workload.copy_bytes:
        rate = _measure_copy_rate(timer, workload.copy_bytes)
        figures = replace(figures, copy_bytes_per_second=rate)
    if workload.layer:
        figures = replace(figures, layer_seconds=_measure_layer_seconds(timer))
    # The time of an output layer's products is subtracted, so their rate must be known.
    if workload.head and figures.matmul_flops:
        seconds = _measure_logit_seconds(timer, *workload.head, figures.matmul_flops)
        figures = replace(figures, logit_seconds=seconds)
    if workload.parameters:
        seconds = _measure_update_seconds(timer, workload.parameters)
        figures = replace(
            figures,
            parameter_seconds=seconds / workload.parameters,
            tensor_seconds=_measure_update_seconds(timer, 1),
        )
    if workload.table:
        seconds = _measure_gradient_seconds(timer, workload.table)
        figures = replace(figures, gradient_seconds=seconds)
    return figures


def median_figures(rounds: list[FiguresByName]) -> FiguresByName:
    """Return for each figure the median over the rounds."""
    return {name: statistics.median(values) for name, values in _join_by_name(rounds)}


def slowest_figures(ranks: list[FiguresByName]) -> FiguresByName:
    """Return for each figure the slowest rank's value: the longest time, or the lowest rate."""
    slowest: FiguresByName = {}
    for name, values in _join_by_name(ranks):
        slowest[name] = max(values) if name.endswith("_seconds") else min(values)
    return slowest


def _join_by_name(parts: list[FiguresByName]) -> Iterator[tuple[str, list[float]]]:
    """Yield each figure's name with its values in all parts; figures without a value are left out."""
    for field in fields(Figures):
        values = [part.get(field.name) for part in parts]
        # The nodes' names are tuples, and a figure that a workload left out is None.
        numbers = [value for value in values if isinstance(value, float)]
        if numbers:
            yield field.name, numbers


def pair_neighbouring_nodes(leaders: list[int]) -> list[tuple[int, int]]:
    """Return pairs of each node's first rank and the next node's, around the ring; two nodes are one pair."""
    if len(leaders) < 2:
        return []
    next_leaders = [*leaders[1:], leaders[0]]
    pairs = list(zip(leaders, next_leaders, strict=True))
    return pairs if len(pairs) > 2 else pairs[:1]


class _Timer:
    """A timer of calls on one device, with the duration and the statistic that a workload asks for."""

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def seconds(self, work: Work, before: Work | None = None) -> float:
        """Return the typical seconds of a call, over at least three calls that take `seconds_each` together.

        `before` runs before each call and is not timed.
        """
        for _ in range(self.workload.warm_up_calls):
            work()
        times: list[float] = []
        while len(times) < 3 or sum(times) < self.workload.seconds_each:
            if before:
                before()
            times.append(time_call(work, self.device, time.process_time))
        return self.typical(times)

    def typical(self, times: list[float]) -> float:
        """Return the mean or the shortest of some times, whichever the workload asks for."""
        return statistics.mean(times) if self.workload.mean else min(times)


def time_call(work: Work, device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call, until the device has finished it.

    On a CPU, `clock` measures. For a rank's own work, processor time is measured. Other processes on the core
    hardly change it.
    """
    if device == "cuda":
        start_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start_event.record()
        work()
        end_event.record()
        end_event.synchronize()
        return float(start_event.elapsed_time(end_event)) / 1000
    start = clock()
    work()
    return clock() - start


def _measure_matmul_flops(timer: _Timer, size: int) -> float:
    """Return the FLOP/s of a product of two square matrices."""
    first = torch.randn(size, size, device=timer.device, dtype=timer.dtype)
    second = torch.randn(size, size, device=timer.device, dtype=timer.dtype)
    product = torch.empty_like(first)
    return 2 * size**3 / timer.seconds(lambda: torch.mm(first, second, out=product))


def _measure_attention_flops(timer: _Timer, heads: int, length: int, width: int) -> float:
    """Return the FLOP/s of an SDPA forward and backward.

    On a GPU the attention is causal, because GPU kernels skip masked scores. CPU kernels compute them, so the
    attention on a CPU has no mask.
    """
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


def _measure_copy_rate(timer: _Timer, size_bytes: int) -> float:
    """Return the bytes per second, read plus written, of a tensor's copy."""
    source = torch.randn(size_bytes // 4, device=timer.device)
    return 2 * size_bytes / timer.seconds(source.clone)


def _measure_layer_seconds(timer: _Timer) -> float:
    """Return the seconds of forward and backward of an encoder layer with almost no arithmetic."""
    layer = torch.nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0.0, norm_first=True, device=timer.device, dtype=timer.dtype
    )
    token = torch.randn(2, 1, 16, device=timer.device, dtype=timer.dtype)
    return timer.seconds(lambda: layer(token).sum().backward())


def _measure_logit_seconds(
    timer: _Timer, tokens: int, width: int, vocabulary: int, flops: float
) -> float:
    """Return the seconds per logit of an output layer and its cross entropy, without its matrix products.

    The steps are those of training, in place where training works in place. `flops` is the rate of products.
    """
    make_normal = partial(torch.randn, device=timer.device, dtype=timer.dtype)
    hidden, weight = make_normal(tokens, width), 0.02 * make_normal(vocabulary, width)
    rows = torch.arange(tokens, device=timer.device)

    def work() -> None:
        logits = hidden @ weight.t()
        logits.sub_(torch.max(logits, dim=-1)[0].unsqueeze(-1))
        target_logits = logits[rows, rows]
        total = torch.exp(logits, out=logits).sum(dim=-1, keepdim=True)
        logits.div_(total)
        logits[rows, rows] -= 1.0
        logits.mul_(torch.log(total) - target_logits.unsqueeze(-1))
        logits @ weight
        logits.t() @ hidden

    product_seconds = 6 * tokens * width * vocabulary / flops
    seconds = timer.seconds(work, before=_make_cache_filler(timer))
    return max(0.0, seconds - product_seconds) / (tokens * vocabulary)


def _measure_update_seconds(timer: _Timer, elements: int) -> float:
    """Return the seconds of one AdamW update of a tensor, unfused and in fp32.

    The time includes zeroing, accumulating, norming and clipping the tensor's gradient.
    """
    weight = torch.nn.Parameter(torch.zeros(elements, device=timer.device))
    weight.grad, new_gradient = torch.zeros_like(weight), torch.ones_like(weight)
    adam = torch.optim.AdamW([weight], lr=1e-6)

    def work() -> None:
        assert weight.grad is not None
        weight.grad.zero_()
        weight.grad.add_(new_gradient)
        norm = torch.linalg.vector_norm(weight.grad, dtype=torch.float64)
        weight.grad.copy_(weight.grad * (1.0 / (1.0 + norm)).float())
        adam.step()

    return timer.seconds(work)


def _measure_gradient_seconds(timer: _Timer, elements: int) -> float:
    """Return the seconds per element of an embedding table's gradient.

    The gradient of a look-up is as large as the table, and is added to that of earlier micro batches.
    """
    summed = torch.zeros(elements, device=timer.device)

    def add_gradient() -> None:
        summed.add_(torch.zeros_like(summed))

    return timer.seconds(add_gradient, before=_make_cache_filler(timer)) / elements


def _make_cache_filler(timer: _Timer) -> Work:
    """Return a function that writes OTHER_BYTES, so that the caches hold nothing of the last call."""
    other_tensor = torch.zeros(OTHER_BYTES // 4, device=timer.device)
    return lambda: other_tensor.add_(1.0)


def _measure_collectives(workload: Workload, device: str) -> dict[str, float]:
    """Return the rates of the workload's collectives, and the latency of an all-reduce if it is asked for."""
    figures: dict[str, float] = {}
    if workload.all_reduce_bytes:
        ranks, typical = dist.get_world_size(), _Timer(workload, device).typical
        full_tensor = torch.zeros(workload.all_reduce_bytes // 4, device=device)
        works: dict[Operation, Work] = {Operation.ALL_REDUCE: lambda: dist.all_reduce(full_tensor)}
        if workload.other_collectives:
            works |= _list_other_collectives(full_tensor, ranks)
        for operation, work in works.items():
            rate = _measure_rate(operation, work, full_tensor, ranks, typical)
            figures[f"{operation}_bytes_per_second"] = rate
    if workload.latency:
        # Without a rate, the latency includes the time of the bytes.
        all_reduce_rate = figures.get("all_reduce_bytes_per_second")
        figures["all_reduce_latency_seconds"] = _measure_latency(device, all_reduce_rate)
    return figures


def _list_other_collectives(full_tensor: torch.Tensor, ranks: int) -> dict[Operation, Work]:
    """Return functions that call reduce-scatter, all-gather and all-to-all on a tensor, by operation."""
    shard = torch.zeros_like(full_tensor[: len(full_tensor) // ranks])
    received = torch.zeros_like(full_tensor)
    return {
        Operation.REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(shard, full_tensor),
        Operation.ALL_GATHER: lambda: dist.all_gather_into_tensor(full_tensor, shard),
        Operation.ALL_TO_ALL: lambda: dist.all_to_all_single(received, full_tensor),
    }


def _measure_rate(
    operation: Operation,
    work: Work,
    tensor: torch.Tensor,
    ranks: int,
    typical: Callable[[list[float]], float] = min,
) -> float:
    """Return the bytes per second that a rank sends in a collective.

    `work` makes the call on `tensor`, and `typical` picks one of the measured times. gloo sends what NCCL sends,
    except in a reduce-scatter (`wire_bytes`).
    """
    sent_bytes = wire_bytes(operation, tensor.nbytes, ranks, Transport.GLOO)
    return sent_bytes / typical(_time_calls(work, tensor.device.type, LARGE_CALLS))


def _measure_latency(device: str, bytes_per_second: float | None) -> float:
    """Return the seconds that a small all-reduce takes in addition to the transfer of its bytes.

    `bytes_per_second` is the measured rate; with None the latency includes the transfer.
    """
    small = torch.zeros(SMALL_BYTES // 4, device=device)
    sent_bytes = wire_bytes(Operation.ALL_REDUCE, SMALL_BYTES, dist.get_world_size())
    transfer_seconds = sent_bytes / bytes_per_second if bytes_per_second else 0.0
    matrix = torch.randn(256, 256, device=device)

    def compute() -> None:
        for _ in range(PRODUCTS):
            matrix @ matrix

    def compute_and_reduce() -> None:
        compute()
        dist.all_reduce(small)

    with_wait = _time_calls(compute_and_reduce, device, SMALL_CALLS)
    without_wait = _time_calls(compute, device, SMALL_CALLS)
    return max(added_seconds(with_wait, without_wait) - transfer_seconds, LEAST_LATENCY_SECONDS)


def added_seconds(with_wait: list[float], without_wait: list[float]) -> float:
    """Return the mean time of calls with a wait minus the mean time of calls without.

    Neither the shortest nor the median call would do: an iteration is the sum of its calls. One in five calls over
    gloo waits for more than 1.5 ms until a gloo thread gets a core, often on all ranks at once.
    """
    return statistics.mean(with_wait) - statistics.mean(without_wait)


def _measure_jitter(workload: Workload, device: str) -> dict[str, float]:
    """Return as `jitter` how much ranks differ in the time for equal work; empty if fewer than two take part.

    Each piece of work is about as long as the work between two calls in training. No ranks wait for each other
    between pieces. If there are more ranks than cores, only as many ranks as cores take part.
    """
    times: list[float] = []
    dist.barrier()
    if device == "cuda" or int(os.environ["LOCAL_RANK"]) < len(os.sched_getaffinity(0)):
        timer = _Timer(workload, device)
        fill_caches, matrix = _make_cache_filler(timer), torch.randn(512, 512, device=device)

        def work() -> None:
            fill_caches()
            for _ in range(PRODUCTS):
                matrix @ matrix

        times = _time_calls(work, device, SPREAD_CALLS)
    times_by_rank: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(times_by_rank, times)
    times_of_participants = [times_of_rank for times_of_rank in times_by_rank if times_of_rank]
    num_participants = len(times_of_participants)
    if num_participants < 2:
        return {}
    longest_seconds = mean_seconds = 0.0
    for times_of_piece in zip(*times_of_participants, strict=True):
        longest_seconds += max(times_of_piece)
        mean_seconds += statistics.mean(times_of_piece)
    excess = longest_seconds / mean_seconds - 1
    return {"jitter": excess / math.sqrt(2 * math.log(num_participants))}


def _time_calls(work: Work, device: str, calls: int) -> list[float]:
    """Return the seconds of each of `calls` calls, after a few untimed ones."""
    for _ in range(WARM_UP_COLLECTIVES):
        work()
    return [time_call(work, device) for _ in range(calls)]


def _measure_pairs(workload: Workload, device: str) -> dict[str, list[str] | list[float]]:
    """Return the nodes' names, and the rate between each node and the next one while all others wait."""
    world_size, ranks_per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    names: list[str] = [""] * world_size
    dist.all_gather_object(names, os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    leaders = list(range(0, world_size, ranks_per_node))
    tensor = torch.zeros((workload.all_reduce_bytes or 0) // 4, device=device)
    rates = [_measure_pair(tensor, *pair) for pair in pair_neighbouring_nodes(leaders)]
    return {"nodes": [names[leader] for leader in leaders], "pair_bytes_per_second": rates}


def _measure_pair(tensor: torch.Tensor, first_rank: int, second_rank: int) -> float:
    """Return the rate of an all-reduce between two ranks, on every rank of the job.

    All ranks must call this function, and the others wait meanwhile.
    """
    group = dist.new_group([first_rank, second_rank])
    rate = torch.zeros(1, device=tensor.device)
    # torch gives the ranks outside the group a placeholder instead of the group.
    if isinstance(group, dist.ProcessGroup):
        reduce_in_pair = partial(dist.all_reduce, tensor, group=group)
        rate[0] = _measure_rate(Operation.ALL_REDUCE, reduce_in_pair, tensor, ranks=2)
    # The other ranks have a rate of 0, so the maximum is the pair's.
    dist.all_reduce(rate, op=dist.ReduceOp.MAX)
    return float(rate)


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[3], type=Workload)
    main(DeviceKind(sys.argv[1]), Path(sys.argv[2]), asked)
