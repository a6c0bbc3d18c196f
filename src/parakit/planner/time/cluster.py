"""A cluster as the planner sees it: equal devices, in nodes, and the rate each group gets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil, log2

from parakit.config.groups import Group
from parakit.config.hardware import Device, Link
from parakit.config.strategy import Parallelism
from parakit.costs import Operation, stride_and_ranks
from parakit.formatting.units import plural
from parakit.planner.time.constants import CONSTANT_NAMES, Constants, load_constants
from parakit.planner.time.execution import Execution


@dataclass(frozen=True)
class Calibration:
    """Constants measured on the machine itself; None takes the generation's (`Constants`)."""

    matmul: float | None = None
    matmul_fp8: float | None = None
    product_fill: float | None = None
    attention: float | None = None
    memory: float | None = None
    layer_launch_seconds: float | None = None
    call_launch_seconds: float | None = None
    link: float | None = None
    hop_seconds: float | None = None
    network_hop_seconds: float | None = None
    contention: float | None = None
    jitter: float | None = None
    link_latency_seconds: float | None = None
    """Of one call inside a node, over any ranks; None takes `hop_seconds` a step."""
    reduce_scatter_share: float = 1.0
    """Of the link's rate, which is that of an all-reduce, what a reduce-scatter's bytes move at."""
    all_gather_share: float = 1.0
    all_to_all_share: float = 1.0
    logit_seconds: float | None = None
    """Of output layer and loss, beside FLOPs, a logit; None counts their kernels' bytes."""
    parameter_seconds: float | None = None
    """Of an update, a parameter: gradient zeroed, added, normed, clipped, Adam; None counts bytes."""
    tensor_seconds: float = 0.0
    """Of the host for an update, a tensor."""
    gradient_seconds: float = 0.0
    """Of a weight's gradient in a micro batch, an element, where no kernel adds it to the others."""
    iteration_host_seconds: float | None = None
    """Of the host for an iteration, beside layers: data, schedule, log; None takes a GPU's usual."""
    launch_beside_work: bool = True
    """Whether the host launches kernels while the device works; on CPU ranks they are the same core."""
    made_with: str = ""
    """Devices, threads and versions that it was measured with; with others it is measured again."""
    source: str = "fitted to published measurements of this generation of devices (src/parakit/planner/README.md)"

    def link_fraction(self, operation: Operation) -> float:
        """Of the link's rate, what a collective's bytes move at inside a node."""
        if operation is Operation.REDUCE_SCATTER:
            return self.reduce_scatter_share
        if operation is Operation.ALL_GATHER:
            return self.all_gather_share
        return self.all_to_all_share if operation is Operation.ALL_TO_ALL else 1.0


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
    cores: int | None = None
    """That CPU ranks share; None where each has a device of its own."""
    nics: int = 0
    """Ports of a node, which its devices share; 0 is one a device."""
    oversubscription: float = 1.0
    """What all ports of a switch bring in for what its uplinks take away (Al-Fares et al., SIGCOMM 2008,
    section 2.1.2). All devices send at once, so between nodes each has its port's rate over this."""

    @cached_property
    def constants(self) -> Constants:
        """The generation's, but for those that were measured."""
        measured = {name: getattr(self.calibration, name) for name in CONSTANT_NAMES}
        known = {name: value for name, value in measured.items() if value is not None}
        return replace(load_constants(self.device.generation), **known)

    @property
    def core_fraction(self) -> float:
        """Of a core, what each rank has while all of them compute."""
        return 1.0 if self.cores is None else min(1.0, self.cores / self.devices)

    @property
    def nodes(self) -> int:
        """Nodes that the devices fill."""
        return -(-self.devices // self.per_node)

    @property
    def network(self) -> str:
        """What joins nodes, in a few words, with what was assumed of it."""
        own = "one port a GPU unless NICS= says so"
        ports = f"{plural(self.nics, 'port')} a node" if self.nics else own
        return f"{self.inter.key} between them with {ports}"


@dataclass(frozen=True)
class Route:
    """The link that one rank's calls in a group use."""

    bytes_per_second: float
    pairwise_bytes_per_second: float
    """Where each rank sends to every other (all-to-all) instead of to its neighbours."""
    ring_seconds: float
    """Latency of one way around a ring of the group's ranks."""
    tree_seconds: float
    """Of one way down a tree of them: no call takes longer than the faster algorithm."""
    link: str
    all_reduce_ways: int = 2
    """Around the ring for an all-reduce; 1 where the latency is that of a whole call."""


@lru_cache(maxsize=65536)
def find_route(cluster: Cluster, parallelism: Parallelism, group: Group) -> Route:
    """The rate of a group under Megatron's order of ranks, tp-cp-ep-dp-pp, TP innermost.

    A group inside a node uses its link. One across nodes shares the node's network ports: a group
    with k ranks in each node has k of them (one port a device, or its share of the node's), never more
    than the inner link. All groups together use all ports, so behind an oversubscribed switch each has
    its share of the uplink.
    """
    stride, ranks = stride_and_ranks(parallelism, group)
    inside = min(ranks, max(1, cluster.per_node // stride))
    constants, measured = cluster.constants, cluster.calibration.link_latency_seconds
    efficiency, intra = constants.link, cluster.intra
    within = intra.bytes_per_second * efficiency
    hop = constants.hop_seconds or intra.latency_seconds
    if stride * ranks <= cluster.per_node:
        ring, tree = hop * (ranks - 1), hop * ceil(log2(max(2, ranks)))
        if measured is not None:
            return Route(within, within, measured, measured, intra.key, all_reduce_ways=1)
        return Route(within, within, ring, tree, intra.key)
    single = group in {Group.PIPELINE, Group.EMBEDDING}
    share = cluster.nics / cluster.per_node if cluster.nics else 1.0
    port = cluster.inter.bytes_per_second * efficiency * share / cluster.oversubscription
    rate = min(port * (1 if single else inside), within)
    nodes = -(-ranks // inside)
    crossing = (ranks - inside) / max(1, ranks - 1)
    far = constants.network_hop_seconds or cluster.inter.latency_seconds
    ring = hop * (ranks - nodes) + far * (nodes - 1)
    tree = hop * ceil(log2(max(2, inside))) + far * ceil(log2(max(2, nodes)))
    # What stays in the node and what leaves it move beside each other.
    pairwise = min(port / crossing, within / max(1e-9, 1 - crossing))
    return Route(rate, pairwise, ring, tree, cluster.inter.key)
