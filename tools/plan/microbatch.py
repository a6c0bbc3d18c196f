"""Seconds that one micro batch takes on one pipeline rank, forward and backward.

They do not depend on data parallelism, sharding or the number of micro batches, so a search over
those reuses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from tools.plan.cluster import Cluster, route
from tools.plan.compute import (
    LayerSeconds,
    embedding_seconds,
    forward_passes,
    head_seconds,
    layer_seconds,
    rates,
)
from tools.plan.configuration import Configuration
from tools.plan.megatron import LATEST
from tools.plan.traffic_context import context_traffic
from tools.plan.traffic_experts import expert_traffic
from tools.plan.traffic_tensor import tensor_traffic
from tools.plan.wire import Phase, Traffic
from tools.records import Batch, Parallelism, Sharding


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """One micro batch on one pipeline rank; communication is what arithmetic does not hide."""

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


def stage_seconds(configuration: Configuration, cluster: Cluster, rank: int) -> StageSeconds:
    """Times of a pipeline rank; raises `NoPeakError` as `rates` does."""
    first, last = rank == 0, rank == configuration.parallelism.pipeline - 1
    return _stage_seconds(_one_microbatch(configuration), cluster, first, last)


def transfer_seconds(cluster: Cluster, parallelism: Parallelism, item: Traffic) -> float:
    """Time of traffic alone on its links."""
    way = route(cluster, parallelism, item.group)
    return item.wire_bytes / way.bytes_per_second + item.calls * way.latency_seconds


def after_hiding(seconds: float, behind: float, contention: float) -> float:
    """What is left of communication that runs beside `behind` seconds of arithmetic."""
    hidden = min(seconds, behind)
    return seconds - hidden + contention * hidden


def _one_microbatch(configuration: Configuration) -> Configuration:
    """The configuration with one micro batch, and data parallelism only where experts need it."""
    own = configuration.parallelism
    data = max(1, own.expert // own.context)
    parallelism = replace(own, data=data, virtual_stages=1, sharding=Sharding.NONE)
    samples = configuration.batch.micro_batch_size
    return replace(configuration, parallelism=parallelism, batch=Batch(samples, samples * data))


@lru_cache(maxsize=65536)
def _stage_seconds(
    configuration: Configuration, cluster: Cluster, first: bool, last: bool
) -> StageSeconds:
    rate = rates(cluster, configuration.dtype)
    layer = layer_seconds(configuration, rate)
    layers = configuration.layers_a_stage
    matmuls, attentions, passes = forward_passes(configuration)
    matmul = layers * (2 + matmuls) * layer.forward_matmul
    attention = layers * (layer.forward_attention * attentions + layer.backward_attention)
    memory = layers * (layer.forward_memory * passes + layer.backward_memory)
    floor = layers * cluster.calibration.layer_launch_seconds
    memory += max(0.0, floor - matmul - attention - memory)
    head_matmul, head_memory = head_seconds(configuration, rate) if last else (0.0, 0.0)
    embedding = embedding_seconds(configuration, rate) if first else 0.0
    return StageSeconds(
        matmul=matmul + head_matmul,
        attention=attention,
        memory_bound=memory + head_memory + embedding,
        tensor_parallel=_tensor_seconds(configuration, cluster, layer, first, last),
        context_parallel=_context_seconds(configuration, cluster, layer),
        expert_parallel=sum(_each(configuration, cluster, expert_traffic(configuration))),
    )


def _tensor_seconds(
    configuration: Configuration, cluster: Cluster, layer: LayerSeconds, first: bool, last: bool
) -> float:
    """Forward's calls are waited for; backward's run beside the weights' gradients."""
    pipeline = configuration.parallelism.pipeline
    rank = 0 if first else pipeline - 1 if last else 1
    calls = [
        item
        for item in tensor_traffic(configuration, rank, LATEST)
        if item.phase is not Phase.GRADIENT_SYNC
    ]
    hideable = sum(_each(configuration, cluster, (item for item in calls if item.hideable)))
    visible = sum(_each(configuration, cluster, (item for item in calls if not item.hideable)))
    beside = configuration.layers_a_stage * layer.weight_gradient_matmul
    return visible + after_hiding(hideable, beside, cluster.calibration.contention)


def _context_seconds(configuration: Configuration, cluster: Cluster, layer: LayerSeconds) -> float:
    """The ring's messages run beside attention on what has arrived; other algorithms wait."""
    calls = list(context_traffic(configuration))
    if not calls:
        return 0.0
    seconds = sum(_each(configuration, cluster, calls))
    if not calls[0].hideable:
        return seconds
    context = configuration.parallelism.context
    attention = layer.forward_attention + layer.backward_attention
    beside = configuration.layers_a_stage * attention * (context - 1) / context
    return after_hiding(seconds, beside, cluster.calibration.contention)


def _each(configuration: Configuration, cluster: Cluster, calls: Iterable[Traffic]) -> list[float]:
    return [transfer_seconds(cluster, configuration.parallelism, item) for item in calls]
