"""Which node of a run this machine is, what its launcher does about the others, and where they write."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from tools.launch.errors import LaunchError, wrong_settings_refused
from tools.records.run import LOG_FILE, NODES_FOLDER, SAMPLES_FILE, StatusRecord
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
        """There is no other node."""

    def failure(self) -> str | None:
        """There is no other node that could fail."""
        return None

    def hangs(self, is_stalled: bool) -> bool:
        """This log is all there is."""
        return is_stalled

    def stopped(self, own: Sequence[int]) -> Sequence[int]:
        """No other node has ranks."""
        return own

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        """There is no other node to wait for."""
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


def node_folder(run_folder: Path, node: int) -> Path:
    """Where a node other than 0 writes."""
    return run_folder / NODES_FOLDER / str(node)


class NodeFiles:
    """The other nodes' logs and samples, on their way into node 0's."""

    def __init__(self, folder: Path, nodes: Sequence[int]) -> None:
        self._folder = folder
        # Made before the others start, so what is there is from an attempt before this one.
        self._read = {place: _size(place / LOG_FILE) for place in map(self._of, nodes)}

    def bring(self) -> None:
        """Add the whole lines that came since the last call."""
        for folder in self._read:
            self._add(folder, whole_lines=True)

    def complete(self) -> None:
        """Add the rest, and the samples, once all nodes have ended."""
        for folder in self._read:
            self._add(folder, whole_lines=False)
            samples = _lines_of(folder / SAMPLES_FILE)[1:]
            with (self._folder / SAMPLES_FILE).open("ab") as file:
                file.writelines(samples)

    def _of(self, node: int) -> Path:
        return node_folder(self._folder, node)

    def _add(self, folder: Path, whole_lines: bool) -> None:
        try:
            # Opened anew each time: a network file system shows what others wrote when it is opened.
            with (folder / LOG_FILE).open("rb") as file:
                file.seek(self._read[folder])
                text = file.read()
        except OSError:
            return
        if whole_lines:
            text = text[: text.rfind(b"\n") + 1]
        if text:
            self._read[folder] += len(text)
            with (self._folder / LOG_FILE).open("ab") as log:
                log.write(text if text.endswith(b"\n") else text + b"\n")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines_of(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except OSError:
        return []
