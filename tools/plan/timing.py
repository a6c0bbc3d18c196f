"""Seconds of one iteration, by component, on the ranks that decide it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from tools.plan.cluster import Cluster
from tools.plan.compute import optimizer_seconds, rates
from tools.plan.megatron import LATEST
from tools.plan.microbatch import Seconds, after_hiding, parts, transfer_seconds
from tools.plan.traffic_bookkeeping import bookkeeping_traffic
from tools.plan.traffic_data import gradient_traffic
from tools.plan.traffic_pipeline import pipeline_traffic
from tools.plan.traffic_tensor import replicated_gradients
from tools.plan.wire import Traffic
from tools.records.measurements import Phase
from tools.spec.groups import Group
from tools.spec.run import RunSpec
from tools.spec.strategy import Batch, Sharding


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

_UNFUSED_PASSES = 5
_OVERLAPPED = (Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP2)


def iteration_seconds(configuration: RunSpec, cluster: Cluster) -> IterationSeconds:
    """Time of one iteration.

    1F1B over stages that take T_i a micro batch lasts m·max(T) + (ΣT − max T)/v: all but the
    slowest stage's work is passed through once at start and end (arXiv:2104.04473 §2.2, with v
    virtual stages).

    Raises:
        NoPeakError: The device has no matrix rate in the configuration's dtype.
    """
    parallelism, count = configuration.parallelism, configuration.microbatches
    slowest, through = pipeline_seconds(configuration, cluster)
    sync, optimizer = synchronisation_seconds(configuration, cluster)
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


def pipeline_seconds(configuration: RunSpec, cluster: Cluster) -> tuple[Seconds, float]:
    """One micro batch on the slowest stage, and its whole way through all stages."""
    pieces, pipeline = parts(configuration, cluster), configuration.parallelism.pipeline
    layers = configuration.layers_a_stage
    first = pieces.stage(layers, first=True, last=pipeline == 1)
    if pipeline == 1:
        return first, first.total
    last = pieces.stage(layers, first=False, last=True)
    middle = pieces.layer.total * layers
    through = first.total + last.total + (pipeline - 2) * middle
    return max(first, last, key=lambda stage: stage.total), through


def synchronisation_seconds(configuration: RunSpec, cluster: Cluster) -> tuple[float, float]:
    """Gradient synchronisation and optimizer of the rank where they take longest."""
    parallelism = replace(configuration.parallelism, virtual_stages=1)
    samples = configuration.microbatches * parallelism.data
    plain = replace(configuration, parallelism=parallelism, batch=Batch(1, samples))
    if parallelism.sharding not in _OVERLAPPED:
        plain = replace(plain, batch=Batch(1, parallelism.data))
    return _synchronisation_seconds(plain, cluster)


@lru_cache(maxsize=65536)
def _synchronisation_seconds(configuration: RunSpec, cluster: Cluster) -> tuple[float, float]:
    ends = {0, configuration.parallelism.pipeline - 1}
    return max((_after_backward(configuration, cluster, rank) for rank in ends), key=sum)


def _message_seconds(configuration: RunSpec, cluster: Cluster) -> float:
    """Stage to stage: 1F1B hides nothing, the interleaved schedule overlaps its messages."""
    parallelism = configuration.parallelism
    if parallelism.pipeline == 1:
        return 0.0
    seconds = sum(
        transfer_seconds(cluster, configuration, item)
        for item in pipeline_traffic(configuration, 0)
        if item.group is Group.PIPELINE
    )
    return seconds * (cluster.calibration.contention if parallelism.virtual_stages > 1 else 1)


def _after_backward(configuration: RunSpec, cluster: Cluster, rank: int) -> tuple[float, float]:
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


def _overlapped_sync_seconds(configuration: RunSpec, cluster: Cluster, compute: float) -> float:
    """ZeRO-2, ZeRO-3 and FSDP2 move layers beside arithmetic; what is moved once is waited for.

    They add unfused gradients: each micro batch writes them, copies them to a bucket and adds it.
    """
    if configuration.parallelism.sharding not in _OVERLAPPED:
        return 0.0
    traffic = list(gradient_traffic(configuration, 0))
    beside = [item for item in traffic if item.phase is not Phase.OPTIMIZER]
    waited = [item for item in traffic if item.phase is Phase.OPTIMIZER]
    gradients = sum(item.total_payload_bytes for item in beside if item.phase is Phase.BACKWARD)
    rate = rates(cluster, configuration.dtype).bytes_per_second
    hidden = _sum(configuration, cluster, beside)
    visible = _sum(configuration, cluster, waited) + _UNFUSED_PASSES * gradients / rate
    return visible + after_hiding(hidden, compute, cluster.calibration.contention)


def _sum(configuration: RunSpec, cluster: Cluster, calls: list[Traffic]) -> float:
    return sum(
        transfer_seconds(cluster, configuration, item) for item in calls if item.payload_bytes
    )
