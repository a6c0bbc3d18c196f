"""Seconds of one iteration, by component, on the ranks that decide it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tools.plan.cluster import Cluster
from tools.plan.compute import optimizer_seconds, rates
from tools.plan.configuration import Configuration
from tools.plan.megatron import LATEST
from tools.plan.microbatch import after_hiding, stage_seconds, transfer_seconds
from tools.plan.traffic_bookkeeping import bookkeeping_traffic
from tools.plan.traffic_data import gradient_traffic
from tools.plan.traffic_pipeline import pipeline_traffic
from tools.plan.traffic_tensor import replicated_gradients
from tools.plan.wire import Group, Traffic
from tools.records import Sharding


@dataclass(frozen=True, slots=True)
class IterationSeconds:
    """Where an iteration's time goes; communication is what is not hidden behind arithmetic."""

    matmul: float
    attention: float
    memory_bound: float
    """Norms, dropouts, activations, the loss, and waiting for the host to launch kernels."""
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
    "Backward's tensor-parallel calls hide behind the weights' gradients, the context ring behind "
    "attention (CUDA_DEVICE_MAX_CONNECTIONS=1).",
    "Data loading, logging, evaluation and checkpoints take no time.",
)

_OVERLAPPED = (Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP2)


def iteration_seconds(configuration: Configuration, cluster: Cluster) -> IterationSeconds:
    """Time of one iteration.

    1F1B over stages that take T_i a micro batch lasts m·max(T) + (ΣT − max T)/v: all but the
    slowest stage's work is passed through once at start and end (arXiv:2104.04473 §2.2, with v
    virtual stages).

    Raises:
        NoPeakError: The device has no matrix rate in the configuration's dtype.
    """
    parallelism, count = configuration.parallelism, configuration.microbatches
    middle = max(0, parallelism.pipeline - 2)
    ends = sorted({0, parallelism.pipeline - 1})
    ranks = [*ends, 1] if middle else ends
    stages = {rank: stage_seconds(configuration, cluster, rank) for rank in ranks}
    slowest = max(stages.values(), key=lambda stage: stage.total)
    through = sum(stages[rank].total for rank in ends)
    through += middle * stages[1].total if middle else 0.0
    sync, optimizer = max((_after_backward(configuration, cluster, rank) for rank in ends), key=sum)
    beside = _overlapped_sync_seconds(configuration, cluster, count * slowest.total)
    return IterationSeconds(
        matmul=count * slowest.matmul,
        attention=count * slowest.attention,
        memory_bound=count * slowest.memory_bound,
        tensor_parallel=count * slowest.tensor_parallel,
        context_parallel=count * slowest.context_parallel,
        expert_parallel=count * slowest.expert_parallel,
        pipeline_messages=_message_seconds(configuration, cluster),
        bubble=(through - slowest.total) / parallelism.virtual_stages,
        gradient_sync=sync + beside,
        optimizer=optimizer,
    )


def _message_seconds(configuration: Configuration, cluster: Cluster) -> float:
    """Stage to stage: 1F1B hides nothing, the interleaved schedule overlaps its messages."""
    parallelism = configuration.parallelism
    seconds = sum(
        transfer_seconds(cluster, parallelism, item)
        for item in pipeline_traffic(configuration, 0)
        if item.group is Group.PIPELINE
    )
    return seconds * (cluster.calibration.contention if parallelism.virtual_stages > 1 else 1)


def _after_backward(
    configuration: Configuration, cluster: Cluster, rank: int
) -> tuple[float, float]:
    """Gradient synchronisation that follows backward, and the optimizer with its reductions."""
    sync = [item for item in pipeline_traffic(configuration, rank) if item.group is Group.EMBEDDING]
    sync += replicated_gradients(configuration, rank)
    if configuration.parallelism.sharding not in _OVERLAPPED:
        sync += gradient_traffic(configuration, rank)
    small = bookkeeping_traffic(configuration, rank, LATEST)
    rate = rates(cluster, configuration.dtype)
    return (
        _sum(configuration, cluster, sync),
        _sum(configuration, cluster, list(small)) + optimizer_seconds(configuration, rate, rank),
    )


def _overlapped_sync_seconds(
    configuration: Configuration, cluster: Cluster, compute: float
) -> float:
    """ZeRO-2, ZeRO-3 and FSDP2 gather and scatter beside arithmetic; what remains visible."""
    if configuration.parallelism.sharding not in _OVERLAPPED:
        return 0.0
    seconds = _sum(configuration, cluster, list(gradient_traffic(configuration, 0)))
    return after_hiding(seconds, compute, cluster.calibration.contention)


def _sum(configuration: Configuration, cluster: Cluster, calls: list[Traffic]) -> float:
    return sum(
        transfer_seconds(cluster, configuration.parallelism, item)
        for item in calls
        if item.ranks > 1 and item.payload_bytes
    )
