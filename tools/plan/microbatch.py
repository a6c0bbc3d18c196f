"""Seconds that one micro batch takes on one pipeline rank, forward and backward.

Built from a layer, an embedding and a head, each of which depends on few choices and is computed
once: a search over pipeline and data parallelism only adds them up.
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
from tools.plan.megatron import LATEST
from tools.plan.traffic_context import context_traffic
from tools.plan.traffic_experts import expert_traffic
from tools.plan.traffic_tensor import (
    batch_traffic,
    embedding_traffic,
    head_traffic,
    layers_traffic,
)
from tools.plan.wire import Traffic
from tools.spec.run import RunSpec
from tools.spec.strategy import Batch, Sharding


@dataclass(frozen=True, slots=True)
class Seconds:
    """Part of one micro batch on one rank; communication is what arithmetic does not hide."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward."""
        arithmetic = self.matmul + self.attention + self.memory_bound
        return arithmetic + self.tensor_parallel + self.context_parallel + self.expert_parallel

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.memory_bound + other.memory_bound,
            self.tensor_parallel + other.tensor_parallel,
            self.context_parallel + other.context_parallel,
            self.expert_parallel + other.expert_parallel,
        )

    def __mul__(self, times: int) -> Seconds:
        return Seconds(
            self.matmul * times,
            self.attention * times,
            self.memory_bound * times,
            self.tensor_parallel * times,
            self.context_parallel * times,
            self.expert_parallel * times,
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """What the stages of a model are made of."""

    layer: Seconds
    embedding: Seconds
    head: Seconds

    def stage(self, layers: int, *, first: bool, last: bool) -> Seconds:
        """One micro batch on a rank with `layers` layers."""
        seconds = self.layer * layers
        if first:
            seconds += self.embedding
        return seconds + self.head if last else seconds


def parts(configuration: RunSpec, cluster: Cluster) -> Parts:
    """Layer, embedding and head of a configuration; raises `NoPeakError` as `rates` does."""
    return _parts(_one_layer(configuration), cluster)


def transfer_seconds(cluster: Cluster, configuration: RunSpec, item: Traffic) -> float:
    """Time of traffic alone on its links; nothing in a group of one rank."""
    if item.ranks == 1:
        return 0.0
    way = route(cluster, configuration.parallelism, item.group)
    sent = item.wire_bytes_over(configuration.transport)
    return sent / way.bytes_per_second + item.calls * way.latency_seconds


def after_hiding(seconds: float, behind: float, contention: float) -> float:
    """What is left of communication that runs beside `behind` seconds of arithmetic."""
    hidden = min(seconds, behind)
    return seconds - hidden + contention * hidden


def _one_layer(configuration: RunSpec) -> RunSpec:
    """The same micro batch with one layer a stage, and no more data parallelism than EP needs."""
    own, shape = configuration.parallelism, configuration.shape
    data = max(1, own.expert // own.context)
    parallelism = replace(
        own, data=data, pipeline=shape.layers, virtual_stages=1, sharding=Sharding.NONE
    )
    samples = configuration.batch.micro_batch_size
    return replace(configuration, parallelism=parallelism, batch=Batch(samples, samples * data))


@lru_cache(maxsize=65536)
def _parts(configuration: RunSpec, cluster: Cluster) -> Parts:
    rate = rates(cluster, configuration.dtype)
    head_matmul, head_memory = head_seconds(configuration, rate)
    batch = _tensor_seconds(
        configuration, cluster, batch_traffic(configuration, False, True, LATEST), 0.0
    )
    embedding = _tensor_seconds(configuration, cluster, embedding_traffic(configuration), 0.0)
    head = _tensor_seconds(configuration, cluster, head_traffic(configuration), head_matmul / 3)
    return Parts(
        layer=_layer(configuration, cluster, layer_seconds(configuration, rate)),
        embedding=Seconds(
            memory_bound=embedding_seconds(configuration, rate), tensor_parallel=embedding + batch
        ),
        head=Seconds(head_matmul, 0.0, head_memory, head + batch),
    )


def _layer(configuration: RunSpec, cluster: Cluster, layer: LayerSeconds) -> Seconds:
    """One layer, never faster than the host launches its kernels; where it does not run ahead of
    the device, its time adds."""
    matmuls, attentions, passes = forward_passes(configuration)
    matmul = (2 + matmuls) * layer.forward_matmul
    attention = layer.forward_attention * attentions + layer.backward_attention
    memory = layer.forward_memory * passes + layer.backward_memory
    # Forward is about a third of a layer's kernels; recomputing launches them again.
    launching = cluster.calibration.layer_launch_seconds * (2 + passes) / 3
    hidden = matmul + attention + memory if cluster.calibration.launch_beside_work else 0.0
    calls, beside = layers_traffic(configuration), layer.weight_gradient_matmul
    return Seconds(
        matmul=matmul,
        attention=attention,
        memory_bound=memory + max(0.0, launching - hidden),
        tensor_parallel=_tensor_seconds(configuration, cluster, calls, beside),
        context_parallel=_context_seconds(configuration, cluster, layer),
        expert_parallel=sum(_each(configuration, cluster, expert_traffic(configuration))),
    )


def _tensor_seconds(
    configuration: RunSpec, cluster: Cluster, traffic: Iterable[Traffic], beside: float
) -> float:
    """Forward's calls are waited for; backward's run beside the weights' gradients."""
    calls = list(traffic)
    hideable = sum(_each(configuration, cluster, (item for item in calls if item.hideable)))
    visible = sum(_each(configuration, cluster, (item for item in calls if not item.hideable)))
    return visible + after_hiding(hideable, beside, cluster.calibration.contention)


def _context_seconds(configuration: RunSpec, cluster: Cluster, layer: LayerSeconds) -> float:
    """The ring's messages run beside attention on what has arrived; other algorithms wait."""
    calls = list(context_traffic(configuration))
    seconds = sum(_each(configuration, cluster, calls))
    if not (calls and calls[0].hideable):
        return seconds
    context = configuration.parallelism.context
    attention = layer.forward_attention + layer.backward_attention
    beside = attention * (context - 1) / context
    return after_hiding(seconds, beside, cluster.calibration.contention)


def _each(configuration: RunSpec, cluster: Cluster, calls: Iterable[Traffic]) -> list[float]:
    return [transfer_seconds(cluster, configuration, item) for item in calls]
