"""Which node of a run this machine is, and how torchrun finds the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tools.launch.errors import LaunchError, wrong_settings_refused
from tools.spec import settings
from tools.spec.settings import whole_below

DEFAULT_PORT = 29500
PORTS = range(1024, 65536)
INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that name the network interface between the nodes, of this machine alone."""


class Rendezvous(StrEnum):
    """torchrun's ways to meet: by the numbers that nodes are given, or as they come."""

    STATIC = "static"
    C10D = "c10d"


@dataclass(frozen=True)
class Nodes:
    """A run over several machines, seen from one of them."""

    count: int
    rank: int
    """Node 0 owns the run folder, and its address is where all meet."""
    address: str
    port: int = DEFAULT_PORT
    rendezvous: Rendezvous = Rendezvous.STATIC
    hosts: tuple[str, ...] = ()
    """Names of all, in node order; known once they have met."""

    def torchrun_flags(self, ranks_a_node: int) -> tuple[str, ...]:
        """What torchrun is told on this node."""
        place = ("--nnodes", str(self.count), "--nproc-per-node", str(ranks_a_node))
        if self.rendezvous is Rendezvous.STATIC:
            meet = ("--master-addr", self.address, "--master-port", str(self.port))
            return (*place, "--node-rank", str(self.rank), *meet)
        # Without `is_host` torchrun guesses from the machine's name who opens the store.
        host = ("--rdzv-conf", f"is_host={int(self.rank == 0)}")
        endpoint = ("--rdzv-endpoint", f"{self.address}:{self.port}", "--rdzv-id", str(self.port))
        return (*place, "--rdzv-backend", "c10d", *endpoint, *host)


@wrong_settings_refused()
def nodes_from_environment(environment: Mapping[str, str] = os.environ) -> Nodes | None:
    """NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and RENDEZVOUS; None for a run on one machine.

    Raises:
        LaunchError: One of them is missing or not of its kind.
    """
    count = settings.NNODES.value(environment)
    if count is None or count == 1:
        return None
    numbered = f"a whole number from 0 to {count - 1}"
    rank = settings.NODE_RANK.read_as(whole_below(count), numbered).value(environment)
    address = settings.MASTER_ADDR.value(environment)
    if rank is None or not address:
        raise LaunchError(
            f"NNODES={count} needs NODE_RANK=, 0 to {count - 1}, different on each host, and "
            "MASTER_ADDR=, the address of the host with NODE_RANK=0; set both."
        )
    rendezvous = settings.RENDEZVOUS.read_as(Rendezvous).value(environment) or Rendezvous.STATIC
    port = settings.MASTER_PORT.value(environment) or DEFAULT_PORT
    return Nodes(count, rank, address, port, rendezvous)
