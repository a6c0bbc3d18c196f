"""What a run's calls cost on the one link between two nodes: the planner's formula for `NET=`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tools.plan.cluster import crossing_groups
from tools.spec.groups import Group
from tools.spec.strategy import Parallelism

NODES = 2


class Sent(Protocol):
    """Calls of one rank: the planner's `Traffic` or a ledger's `Calls`."""

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
