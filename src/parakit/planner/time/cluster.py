"""A cluster of equal devices in nodes, and the rate of the link that each process group gets.

`Cluster` joins a device, its links and the constants of calibration. `find_route` gives bandwidth and latency of a
group's calls.
"""

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
    """Constants that were measured on the user's machine. The names of the fields are the keys of a calibration file.

    None means that the constant of the device's generation is used (`Constants`).
    """

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
    """Latency of one call inside a node, over any number of ranks; None takes `hop_seconds` per step."""
    reduce_scatter_share: float = 1.0
    """Rate of a reduce-scatter's bytes, as a fraction of the link's rate, which is that of an all-reduce."""
    all_gather_share: float = 1.0
    all_to_all_share: float = 1.0
    logit_seconds: float | None = None
    """Seconds per logit of output layer and loss, without their FLOPs; None counts the bytes of their kernels."""
    parameter_seconds: float | None = None
    """Seconds per parameter of an update: gradient set to zero, added, normed and clipped, and Adam; None counts
    bytes."""
    tensor_seconds: float = 0.0
    """Seconds of the host per tensor of an update."""
    gradient_seconds: float = 0.0
    """Seconds per element of a weight's gradient and micro batch, where no kernel adds it to earlier micro batches'."""
    iteration_host_seconds: float | None = None
    """Seconds of the host per iteration without its layers: data, schedule, log; None takes a GPU's usual time."""
    launch_beside_work: bool = True
    """True if the host launches kernels while the device computes; on CPU ranks both are the same core."""
    made_with: str = ""
    """Devices, threads and versions of the calibration. With other ones the machine is calibrated once more."""
    source: str = "fitted to published measurements of this generation of devices (src/parakit/planner/README.md)"

    def link_fraction(self, operation: Operation) -> float:
        """Return the rate of a collective's bytes inside a node, as a fraction of the link's rate."""
        if operation is Operation.REDUCE_SCATTER:
            return self.reduce_scatter_share
        if operation is Operation.ALL_GATHER:
            return self.all_gather_share
        return self.all_to_all_share if operation is Operation.ALL_TO_ALL else 1.0


@dataclass(frozen=True, eq=False)
class Cluster:
    """Cluster of `devices` identical devices with `per_node` devices per node. Two clusters are equal only if they are
    one object.
    """

    device: Device
    devices: int
    per_node: int
    intra: Link
    inter: Link
    calibration: Calibration = field(default_factory=Calibration)
    execution: Execution = field(default_factory=Execution)
    cores: int | None = None
    """Cores that CPU ranks share; None where each rank has a device of its own."""
    nics: int = 0
    """Network ports per node, which the node's devices share; 0 is one port per device."""
    oversubscription: float = 1.0
    """Bandwidth into a switch over that of its uplinks (Al-Fares et al., SIGCOMM 2008, section 2.1.2). All devices send
    at once, so between nodes each device has its port's rate divided by this number."""

    @cached_property
    def constants(self) -> Constants:
        """Constants of the device's generation, but for those that were measured."""
        measured = {name: getattr(self.calibration, name) for name in CONSTANT_NAMES}
        known = {name: value for name, value in measured.items() if value is not None}
        return replace(load_constants(self.device.generation), **known)

    @property
    def core_fraction(self) -> float:
        """Fraction of a core per rank while all ranks compute; 1 for GPUs."""
        return 1.0 if self.cores is None else min(1.0, self.cores / self.devices)

    @property
    def nodes(self) -> int:
        """Number of nodes that the devices fill."""
        return -(-self.devices // self.per_node)

    @property
    def network(self) -> str:
        """Phrase for the network between nodes and its ports, such as `ib-400g between nodes with 4 ports per node`."""
        assumed = "one port per GPU, the default"
        ports = f"{plural(self.nics, 'port')} per node" if self.nics else assumed
        return f"{self.inter.key} between nodes with {ports}"


@dataclass(frozen=True)
class Route:
    """Bandwidth and latency of the link that one rank's calls in a process group use."""

    bytes_per_second: float
    pairwise_bytes_per_second: float
    """Bandwidth where each rank sends to every other rank (all-to-all) instead of to its neighbours."""
    ring_seconds: float
    """Latency of one way around a ring of the group's ranks."""
    tree_seconds: float
    """Latency of one way down a tree of the ranks. A call takes the faster of both algorithms."""
    link: str
    all_reduce_rounds: int = 2
    """Ways around the ring for an all-reduce; 1 where the latency is that of a full call."""


@lru_cache(maxsize=65536)
def find_route(cluster: Cluster, parallelism: Parallelism, group: Group) -> Route:
    """Return the bandwidth and the latency of the link that a process group uses.

    Ranks have Megatron's order tp-cp-ep-dp-pp, with TP innermost. A group inside a node uses the link of the node. A
    group across nodes uses network ports: k ranks in a node have the bandwidth of k ports, or of their fraction of the
    node's ports. Pipeline stages and tied embeddings communicate over one port only. The bandwidth never exceeds the
    bandwidth of the node's link. Oversubscription divides the bandwidth of a port, because all groups together use all
    ports.
    """
    stride, ranks = stride_and_ranks(parallelism, group)
    ranks_per_node = min(ranks, max(1, cluster.per_node // stride))
    constants, measured_latency = cluster.constants, cluster.calibration.link_latency_seconds
    efficiency, intra = constants.link, cluster.intra
    inner_rate = intra.bytes_per_second * efficiency
    hop = constants.hop_seconds or intra.latency_seconds
    if stride * ranks <= cluster.per_node:
        if measured_latency is not None:
            latency = measured_latency
            return Route(inner_rate, inner_rate, latency, latency, intra.key, all_reduce_rounds=1)
        ring, tree = hop * (ranks - 1), hop * ceil(log2(max(2, ranks)))
        return Route(inner_rate, inner_rate, ring, tree, intra.key)
    uses_one_port = group in {Group.PIPELINE, Group.EMBEDDING}
    ports_per_device = cluster.nics / cluster.per_node if cluster.nics else 1.0
    port_rate = (
        cluster.inter.bytes_per_second * efficiency * ports_per_device / cluster.oversubscription
    )
    rate = min(port_rate * (1 if uses_one_port else ranks_per_node), inner_rate)
    nodes = -(-ranks // ranks_per_node)
    crossing_fraction = (ranks - ranks_per_node) / max(1, ranks - 1)
    network_hop = constants.network_hop_seconds or cluster.inter.latency_seconds
    ring = hop * (ranks - nodes) + network_hop * (nodes - 1)
    tree = hop * ceil(log2(max(2, ranks_per_node))) + network_hop * ceil(log2(max(2, nodes)))
    # Bytes that stay in the node and bytes that leave it move concurrently.
    pairwise_rate = min(
        port_rate / crossing_fraction, inner_rate / max(1e-9, 1 - crossing_fraction)
    )
    return Route(rate, pairwise_rate, ring, tree, cluster.inter.key)
