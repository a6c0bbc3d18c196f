"""Seconds that one link between two nodes is busy if all process groups that cross the link share
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from parakit.config.groups import Group, group_size
from parakit.config.strategy import Parallelism

NUM_NODES = 2
"""Number of nodes, each with half of the ranks."""


class Sent(Protocol):
    """Identical calls of one rank: a `CollectiveCall`, or an entry of a communication log."""

    @property
    def group(self) -> str:
        """Name of the process group."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends over all these calls."""


def link_seconds(calls: Iterable[Sent], parallelism: Parallelism, bits_per_second: float) -> float:
    """Return the seconds per iteration for which the calls use the link between two nodes, in each direction.

    The first half of the ranks is on one node and the second half on the other. Only groups with ranks on both
    nodes use the link. Such a group is a ring: in one direction it sends over the link as many bytes as one of
    its ranks sends. All rings share the link's rate. The transfers are assumed to follow one another.
    """
    per_node, sent = parallelism.world_size // NUM_NODES, 0
    for call in calls:
        # A communication log may name a group that Megatron does not have. Such a group is taken to
        # span all ranks.
        group = Group(call.group) if call.group in set(Group) else Group.WORLD
        stride, ranks = stride_and_ranks(parallelism, group)
        if stride * ranks > per_node:
            group_ranks_per_node = min(ranks, max(1, per_node // stride))
            crossing_groups = max(1, per_node // group_ranks_per_node)
            sent += call.wire_bytes * crossing_groups
    return 8 * sent / bits_per_second


def seconds_at_other_rate(seconds: float, link: float, measured_at: float, rate: float) -> float:
    """Return the seconds of an iteration at another link rate. Only the seconds of the link change.

    Args:
        seconds: Measured seconds of the iteration.
        link: Result of `link_seconds` at the rate of the measurement.
        measured_at: Rate of the measurement in bit/s.
        rate: The other rate in bit/s.
    """
    return seconds + link * (measured_at / rate - 1)


def stride_and_ranks(parallelism: Parallelism, group: Group) -> tuple[int, int]:
    """Return the distance between neighbours of a group in global ranks, and the group's size.

    For groups without a constant distance, the result is the distance and the size of the group of all ranks. The
    error is small, because such groups communicate only a few numbers.
    """
    tensor, context = parallelism.tensor, parallelism.context
    replicas = tensor * context * parallelism.data
    expert_tensor = parallelism.effective_expert_tensor
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
    return strides[group], group_size(parallelism, group)
