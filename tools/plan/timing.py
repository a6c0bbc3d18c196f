"""Seconds of one iteration, by component, on the rank that decides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from tools.plan.cluster import Cluster, route
from tools.plan.communication import communication_of_rank
from tools.plan.compute import (
    LayerSeconds,
    Rates,
    embedding_seconds,
    forward_passes,
    head_seconds,
    layer_seconds,
    optimizer_seconds,
    rates,
)
from tools.plan.configuration import Configuration
from tools.plan.wire import Group, Phase, Traffic
from tools.records import Sharding


@dataclass(frozen=True, slots=True)
class IterationSeconds:
    """Where an iteration's time goes; communication is what is not hidden behind arithmetic."""

    matmul: float
    attention: float
    memory_bound: float
    """Norms, dropouts, activations, the loss."""
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline_messages: float
    bubble: float
    """Waiting for other stages; with stages of unequal work also the wait for the slowest."""
    gradient_sync: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of an iteration."""
        inside = self.matmul + self.attention + self.memory_bound
        layers = self.tensor_parallel + self.context_parallel + self.expert_parallel
        between = self.pipeline_messages + self.bubble
        return inside + layers + between + self.gradient_sync + self.optimizer


TIME_COMPONENTS = tuple(field.name for field in fields(IterationSeconds))

ASSUMPTIONS = (
    "Gradients are reduced after the last backward, as without --overlap-grad-reduce; ZeRO-2, "
    "ZeRO-3 and FSDP2 overlap theirs.",
    "Backward's tensor-parallel all-reduce hides behind the weight-gradient product, the context "
    "ring behind attention (CUDA_DEVICE_MAX_CONNECTIONS=1).",
    "Data loading, logging, evaluation and checkpoints take no time.",
)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One micro batch on one pipeline rank."""

    matmul: float
    attention: float
    memory_bound: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float

    @property
    def total(self) -> float:
        """Seconds, forward and backward."""
        arithmetic = self.matmul + self.attention + self.memory_bound
        return arithmetic + self.tensor_parallel + self.context_parallel + self.expert_parallel


def iteration_seconds(configuration: Configuration, cluster: Cluster) -> IterationSeconds:
    """Time of one iteration.

    1F1B over stages that take T_i a micro batch lasts m·max(T) + (ΣT − max T)/v: all but the
    slowest stage's work is passed through once at start and end (arXiv:2104.04473 §2.2, with v
    virtual stages).

    Raises:
        NoPeakError: The device has no matrix rate in the configuration's dtype.
    """
    rate = rates(cluster, configuration.dtype)
    parallelism, count = configuration.parallelism, configuration.microbatches
    layer = layer_seconds(configuration, rate)
    ends = sorted({0, min(1, parallelism.pipeline - 1), parallelism.pipeline - 1})
    stages = {rank: _stage(configuration, cluster, rate, layer, rank) for rank in ends}
    totals = [
        stages[_like(rank, parallelism.pipeline)].total for rank in range(parallelism.pipeline)
    ]
    slowest = stages[_like(totals.index(max(totals)), parallelism.pipeline)]
    fill = (sum(totals) - slowest.total) / parallelism.virtual_stages
    messages = _message_seconds(configuration, cluster)
    after = [_after_backward(configuration, cluster, rate, rank) for rank in ends]
    sync, optimizer = max(after, key=sum)
    return IterationSeconds(
        matmul=count * slowest.matmul,
        attention=count * slowest.attention,
        memory_bound=count * slowest.memory_bound,
        tensor_parallel=count * slowest.tensor_parallel,
        context_parallel=count * slowest.context_parallel,
        expert_parallel=count * slowest.expert_parallel,
        pipeline_messages=messages,
        bubble=fill,
        gradient_sync=sync + _sharded_sync_seconds(configuration, cluster, count * slowest.total),
        optimizer=optimizer,
    )


def _like(rank: int, pipeline: int) -> int:
    """The first, the second or the last stage, whichever `rank` equals in work."""
    if rank in {0, pipeline - 1}:
        return rank
    return 1


def _stage(
    configuration: Configuration, cluster: Cluster, rate: Rates, layer: LayerSeconds, rank: int
) -> _Stage:
    layers = configuration.layers_a_stage
    last = rank == configuration.parallelism.pipeline - 1
    head_matmul, head_memory = head_seconds(configuration, rate) if last else (0.0, 0.0)
    embedding = embedding_seconds(configuration, rate) if rank == 0 else 0.0
    matmuls, attentions, passes = forward_passes(configuration)
    matmul = layers * (2 + matmuls) * layer.forward_matmul + head_matmul
    attention = layers * (layer.forward_attention * attentions + layer.backward_attention)
    memory = layers * (layer.forward_memory * passes + layer.backward_memory)
    floor = layers * cluster.calibration.layer_launch_seconds
    idle = max(0.0, floor - matmul - attention - memory)
    traffic = communication_of_rank(configuration, rank)
    tensor, context, expert = _exposed(configuration, cluster, traffic, layer)
    return _Stage(
        matmul, attention, memory + head_memory + embedding + idle, tensor, context, expert
    )


def _exposed(
    configuration: Configuration,
    cluster: Cluster,
    traffic: Sequence[Traffic],
    layer: LayerSeconds,
) -> tuple[float, float, float]:
    """Communication inside layers that arithmetic does not hide, a micro batch: TP, CP and EP."""
    layers, contention = configuration.layers_a_stage, cluster.calibration.contention
    count = configuration.microbatches
    tensor = _tensor_seconds(configuration, cluster, traffic)
    hidden = layers * layer.weight_gradient_matmul
    visible = tensor["exposed"] / count + _after_hiding(
        tensor["hidden"] / count, hidden, contention
    )
    ring = _seconds(configuration, cluster, traffic, Group.CONTEXT) / count
    behind = 0.0
    if configuration.cp_comm_type == "p2p":
        context = configuration.parallelism.context
        attention = layer.forward_attention + layer.backward_attention
        behind = layers * attention * (context - 1) / context
    expert = sum(
        _seconds(configuration, cluster, traffic, group)
        for group in (Group.EXPERT, Group.EXPERT_TENSOR, Group.TENSOR_EXPERT)
    )
    return visible, _after_hiding(ring, behind, contention), expert / count


def _after_hiding(seconds: float, behind: float, contention: float) -> float:
    """What is left of communication that runs beside `behind` seconds of arithmetic."""
    hidden = min(seconds, behind)
    return seconds - hidden + contention * hidden


_HIDDEN_IN_BACKWARD = (
    "input gradients of column-parallel matrices",
    "input gradients of the output layer",
    "the same inputs again, for weights",
    "their gradients",
    "input of the output layer again",
)


def _tensor_seconds(
    configuration: Configuration, cluster: Cluster, traffic: Sequence[Traffic]
) -> dict[str, float]:
    seconds = {"exposed": 0.0, "hidden": 0.0}
    for item in traffic:
        if item.group is Group.TENSOR and item.phase is not Phase.GRADIENT_SYNC:
            kind = "hidden" if item.what in _HIDDEN_IN_BACKWARD else "exposed"
            seconds[kind] += _transfer_seconds(configuration, cluster, item)
    return seconds


def _seconds(
    configuration: Configuration, cluster: Cluster, traffic: Sequence[Traffic], group: Group
) -> float:
    items = (item for item in traffic if item.group is group)
    return sum(_transfer_seconds(configuration, cluster, item) for item in items)


def _transfer_seconds(configuration: Configuration, cluster: Cluster, item: Traffic) -> float:
    way = route(cluster, configuration.parallelism, item.group)
    return item.wire_bytes / way.bytes_per_second + item.calls * way.latency_seconds


def _message_seconds(configuration: Configuration, cluster: Cluster) -> float:
    """Stage to stage: 1F1B hides nothing, the interleaved schedule overlaps its messages."""
    parallelism = configuration.parallelism
    if parallelism.pipeline == 1:
        return 0.0
    traffic = communication_of_rank(configuration, 0)
    seconds = _seconds(configuration, cluster, traffic, Group.PIPELINE)
    hidden = parallelism.virtual_stages > 1
    return cluster.calibration.contention * seconds if hidden else seconds


def _after_backward(
    configuration: Configuration, cluster: Cluster, rate: Rates, rank: int
) -> tuple[float, float]:
    """Gradient synchronisation that follows backward, and the optimizer with its reductions."""
    sync = small = 0.0
    overlapped = configuration.parallelism.sharding not in {Sharding.NONE, Sharding.ZERO1}
    for item in communication_of_rank(configuration, rank):
        seconds = _transfer_seconds(configuration, cluster, item)
        gradients = item.group in {Group.DATA_CONTEXT, Group.EXPERT_DATA}
        weights = gradients and item.payload_bytes > _BOOKKEEPING_BYTES
        if item.phase is Phase.GRADIENT_SYNC or (weights and not overlapped):
            sync += seconds
        elif item.phase is Phase.OPTIMIZER and not weights:
            small += seconds
    return sync, small + optimizer_seconds(configuration, rate, rank)


_BOOKKEEPING_BYTES = 4096


def _sharded_sync_seconds(configuration: Configuration, cluster: Cluster, compute: float) -> float:
    """ZeRO-2, ZeRO-3 and FSDP2 gather and scatter beside arithmetic; what remains visible."""
    if configuration.parallelism.sharding in {Sharding.NONE, Sharding.ZERO1}:
        return 0.0
    seconds = sum(
        _transfer_seconds(configuration, cluster, item)
        for item in communication_of_rank(configuration, 0)
        if item.group in {Group.DATA_CONTEXT, Group.EXPERT_DATA}
    )
    return _after_hiding(seconds, compute, cluster.calibration.contention)
