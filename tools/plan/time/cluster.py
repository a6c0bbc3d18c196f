"""A cluster as the planner sees it: equal devices, in nodes, and the rate each group gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from tools.plan.time.execution import Execution
from tools.spec.groups import Group, group_ranks
from tools.spec.hardware import Device, Link
from tools.spec.strategy import Parallelism


@dataclass(frozen=True)
class Calibration:
    """What devices and links reach of their datasheets: one set for every configuration.

    The defaults are fitted to the six published H200 iteration times together (see the README);
    a measurement on the machine itself replaces them.
    """

    matmul: float | None = None
    """Of the dense peak, by a large matrix product whose operands cost nothing to read; None takes
    the device's own figure."""
    attention: float = 0.35
    """Of the dense peak, by attention, forward and backward together."""
    memory: float = 0.7
    """Of the memory bandwidth, by elementwise kernels and by operands of matrix products."""
    link: float = 0.65
    """Of the link rate, by large collectives and messages."""
    link_latency_seconds: float | None = None
    """Of one call inside a node; None takes the link's own figure."""
    contention: float = 0.5
    """Of the time of communication hidden behind arithmetic, lost because it takes SMs and memory
    bandwidth from it."""
    layer_launch_seconds: float = 400e-6
    """Least time of one layer, forward and backward: the host launches about a hundred kernels
    (an estimate)."""
    launch_beside_work: bool = True
    """Whether the host launches kernels while the device works; on CPU ranks they are the same core."""
    source: str = "fitted to the six published H200 iteration times, all together"


@dataclass(frozen=True, eq=False)
class Cluster:
    """`devices` equal devices, `per_node` of them in each node; compared by identity."""

    device: Device
    devices: int
    per_node: int
    intra: Link
    inter: Link
    calibration: Calibration = field(default_factory=Calibration)
    execution: Execution = field(default_factory=Execution)

    @property
    def nodes(self) -> int:
        """Nodes that the devices fill."""
        return -(-self.devices // self.per_node)


@dataclass(frozen=True)
class Route:
    """The link that one rank's calls in a group use."""

    bytes_per_second: float
    latency_seconds: float
    link: str


@lru_cache(maxsize=65536)
def route(cluster: Cluster, parallelism: Parallelism, group: Group) -> Route:
    """The rate of a group under Megatron's order of ranks, tp-cp-ep-dp-pp, TP innermost.

    A group inside a node uses its link. One across nodes shares the node's network ports: a group
    with k ranks in each node has k of them (one port a device), never more than the inner link.
    """
    stride, ranks = _stride_and_ranks(parallelism, group)
    inside = min(ranks, max(1, cluster.per_node // stride))
    efficiency = cluster.calibration.link
    if stride * ranks <= cluster.per_node:
        intra, measured = cluster.intra, cluster.calibration.link_latency_seconds
        latency = intra.latency_seconds if measured is None else measured
        return Route(intra.bytes_per_second * efficiency, latency, intra.key)
    ports = 1 if group in {Group.PIPELINE, Group.EMBEDDING} else inside
    rate = min(cluster.inter.bytes_per_second * ports, cluster.intra.bytes_per_second)
    return Route(rate * efficiency, cluster.inter.latency_seconds, cluster.inter.key)


def crossing_groups(parallelism: Parallelism, group: Group, per_node: int) -> int:
    """Groups of this kind that have ranks on both of two nodes; 0 where each lies on one."""
    stride, ranks = _stride_and_ranks(parallelism, group)
    if stride * ranks <= per_node:
        return 0
    inside = min(ranks, max(1, per_node // stride))
    return max(1, per_node // inside)


def _stride_and_ranks(parallelism: Parallelism, group: Group) -> tuple[int, int]:
    """Distance between neighbours of a group in global ranks, and its size.

    Groups that no single stride describes move a few numbers only; they count as the whole world.
    """
    tensor, context = parallelism.tensor, parallelism.context
    replicas = tensor * context * parallelism.data
    expert_tensor = parallelism.tensor_of_experts
    strides = {
        Group.TENSOR: 1,
        Group.EXPERT_TENSOR: 1,
        Group.CONTEXT: tensor,
        Group.TENSOR_CONTEXT: 1,
        Group.EXPERT: expert_tensor,
        Group.TENSOR_EXPERT: 1,
        Group.DATA_CONTEXT: tensor,
        Group.EXPERT_DATA: expert_tensor * parallelism.expert,
        Group.PIPELINE: replicas,
        Group.EMBEDDING: replicas * max(1, parallelism.pipeline - 1),
    }
    if group not in strides:
        return 1, parallelism.world_size
    return strides[group], group_ranks(parallelism, group)


NODES = 2


class Sent(Protocol):
    """Calls of one rank: the planner's `CollectiveCall` or a ledger's `Calls`."""

    @property
    def group(self) -> str:
        """Name of the process group."""

    @property
    def wire_bytes(self) -> int:
        """Sent by this rank over all these calls."""


def link_seconds(calls: Iterable[Sent], parallelism: Parallelism, bits_per_second: float) -> float:
    """Seconds of an iteration that the link is busy, each way, if nothing runs beside it.

    Half of the ranks, in order, sit on each side. Every ring that crosses the link carries there what
    each of its ranks sends; groups that lie on one side do not use it. All rings share the link.
    """
    per_node = parallelism.world_size // NODES
    sent = sum(
        call.wire_bytes * crossing_groups(parallelism, _group(call.group), per_node)
        for call in calls
    )
    return 8 * sent / bits_per_second


def at_other_rate(seconds: float, link: float, measured_at: float, rate: float) -> float:
    """An iteration measured at one rate, as it would be at another: only the link's part changes.

    Args:
        seconds: The measured iteration.
        link: `link_seconds` at the rate it was measured at.
        measured_at: That rate in bit/s.
        rate: The other rate in bit/s.
    """
    return seconds + link * (measured_at / rate - 1)


def _group(name: str) -> Group:
    """A ledger's group; one that Megatron does not have spans all ranks."""
    return Group(name) if name in set(Group) else Group.WORLD
