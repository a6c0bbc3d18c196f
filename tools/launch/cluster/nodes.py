"""Which node of a run this machine is, and what its launcher does about the others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from tools.launch.errors import LaunchError, wrong_settings_refused
from tools.records.run import StatusRecord
from tools.spec import settings
from tools.spec.setting import whole_below

DEFAULT_PORT = 29500
PORTS = range(1024, 65536)
INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that name the network interface between the nodes, of this machine alone."""


class Rendezvous(StrEnum):
    """torchrun's ways to find all nodes: by the numbers that they are given, or as they come."""

    STATIC = "static"
    C10D = "c10d"


@dataclass(frozen=True)
class Nodes:
    """A run over several machines, seen from one of them."""

    count: int
    rank: int
    """Node 0 owns the run folder, and all connect to its address."""
    address: str
    port: int = DEFAULT_PORT
    rendezvous: Rendezvous = Rendezvous.STATIC
    hosts: tuple[str, ...] = ()
    """Names of all, in node order; known once all have come."""

    def torchrun_flags(self, ranks_a_node: int) -> tuple[str, ...]:
        """torchrun's flags on this node."""
        place = ("--nnodes", str(self.count), "--nproc-per-node", str(ranks_a_node))
        if self.rendezvous is Rendezvous.STATIC:
            master = ("--master-addr", self.address, "--master-port", str(self.port))
            return (*place, "--node-rank", str(self.rank), *master)
        # Without `is_host` torchrun guesses from the machine's name who opens the store.
        host = ("--rdzv-conf", f"is_host={int(self.rank == 0)}")
        endpoint = ("--rdzv-endpoint", f"{self.address}:{self.port}", "--rdzv-id", str(self.port))
        return (*place, "--rdzv-backend", "c10d", *endpoint, *host)


class NodeGroup(Protocol):
    """What a launcher does about the other nodes while its own ranks train."""

    @property
    def cause(self) -> StatusRecord | None:
        """How the run ended, where another node's end was the first cause and no log says so."""
        ...

    def announce(self, folder: Path) -> None:
        """Let them start: the run folder is there."""
        ...

    def failure(self) -> str | None:
        """Why this node must stop, if it must; called several times a second."""
        ...

    def hangs(self, is_stalled: bool) -> bool:
        """Whether the run hangs, where this node's log has not grown for the timeout or has.

        Megatron prints on its last rank alone, so node 0, whose log receives all lines, decides.
        """
        ...

    def stopped(self, own: Sequence[int]) -> Sequence[int]:
        """Once this node's stacks are collected: wait for the others'; the stopped ranks of all."""
        ...

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:
        """Report how this node ended, wait for the others; the whole run's exit code.

        Args:
            exit_code: torchrun's; anything but 0 if this node did not wait for it.
            error: What the launcher was ended by, if by anything.
        """
        ...


class SingleNode:
    """A run on one machine."""

    cause = None

    def announce(self, folder: Path) -> None:
        """There is nobody else."""

    def failure(self) -> str | None:
        """There is nobody who could fail."""
        return None

    def hangs(self, is_stalled: bool) -> bool:
        """This log is all there is."""
        return is_stalled

    def stopped(self, own: Sequence[int]) -> Sequence[int]:
        """Nobody else has ranks."""
        return own

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        """Nobody is waited for."""
        return exit_code


SINGLE_NODE = SingleNode()


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
