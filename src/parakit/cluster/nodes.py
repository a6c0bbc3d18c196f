"""Which node of a run this machine is, what its launcher does about the others, and where they write."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from parakit.artifacts.run import LOG_FILE, NODES_FOLDER, SAMPLES_FILE, StatusRecord
from parakit.config.errors import LaunchError

DEFAULT_PORT = 29500


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
    interface: str | None = None
    """This machine's network interface between them; known then, unless addresses are translated."""
    local_address: str | None = None
    """This machine's address on that interface, at which the other nodes reach it."""

    def torchrun_flags(self, ranks_per_node: int) -> tuple[str, ...]:
        """torchrun's flags on this node."""
        place = ("--nnodes", str(self.count), "--nproc-per-node", str(ranks_per_node))
        if self.rendezvous is Rendezvous.STATIC:
            master = ("--master-addr", self.address, "--master-port", str(self.port))
            return (*place, "--node-rank", str(self.rank), *master)
        # Without `is_host` torchrun guesses from the machine's name who opens the store.
        host = ("--rdzv-conf", f"is_host={int(self.rank == 0)}")
        endpoint = ("--rdzv-endpoint", f"{self.address}:{self.port}", "--rdzv-id", str(self.port))
        # Any node may become the first one, whose own name is then the address for all ranks.
        local = ("--local-addr", self.local_address) if self.local_address else ()
        return (*place, "--rdzv-backend", "c10d", *endpoint, *host, *local)


class NodeGroup:
    """What a launcher does about the other nodes while its own ranks train; here there is none."""

    cause: StatusRecord | None = None
    """How the run ended, where another node's end was the first cause and no log says so."""

    def announce(self, folder: Path) -> None:
        """Let the others start: the run folder is there."""

    def find_failure(self) -> str | None:
        """Why this node must stop, if it must; called several times a second."""
        return None

    def is_hanging(self, is_stalled: bool) -> bool:
        """Whether the run hangs, where this node's log has not grown for the timeout or has.

        Megatron prints on its last rank alone, so node 0, whose log receives all lines, decides.
        """
        return is_stalled

    def wait_for_stacks(self, stopped_ranks: Sequence[int]) -> Sequence[int]:
        """Once this node's stacks are collected: wait for the others'; the stopped ranks of all."""
        return stopped_ranks

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        """Report how this node ended, wait for the others; the whole run's exit code.

        Args:
            exit_code: torchrun's; anything but 0 if this node did not wait for it.
            error: What the launcher was ended by, if by anything.
        """
        return exit_code


SINGLE_NODE = NodeGroup()


def parse_nodes(given: Namespace) -> Nodes | None:
    """NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and RENDEZVOUS; None for a run on one machine.

    Raises:
        LaunchError: One of them is missing or not of its kind.
    """
    count = getattr(given, "nnodes", None)
    if count is None or count == 1:
        return None
    rank, address = given.node_rank, given.master_addr
    if rank is not None and (not rank.isdecimal() or int(rank) >= count):
        raise LaunchError(f"NODE_RANK={rank} is not a whole number from 0 to {count - 1}.")
    if rank is None or not address:
        raise LaunchError(
            f"NNODES={count} needs NODE_RANK=, 0 to {count - 1}, different on each host, and "
            "MASTER_ADDR=, the address of the host with NODE_RANK=0; set both."
        )
    rendezvous = Rendezvous(given.rendezvous or Rendezvous.STATIC)
    return Nodes(count, int(rank), address, given.master_port or DEFAULT_PORT, rendezvous)


def node_folder(run_folder: Path, node: int) -> Path:
    """Where a node other than 0 writes."""
    return run_folder / NODES_FOLDER / str(node)


class NodeFiles:
    """The other nodes' logs and samples, on their way into node 0's."""

    def __init__(self, folder: Path, nodes: Sequence[int]) -> None:
        self._folder = folder
        others = [node_folder(folder, node) for node in nodes]
        # Made before the others start, so what is there is from an attempt before this one.
        self._read = {other: len(_bytes_of(other / LOG_FILE)) for other in others}

    def append_new_output(self, whole_lines: bool = True) -> None:
        """Add what came since the last call, up to the last whole line unless all nodes have ended."""
        for folder, position in self._read.items():
            text = _bytes_of(folder / LOG_FILE, position)
            if whole_lines:
                text = text[: text.rfind(b"\n") + 1]
            if text:
                self._read[folder] = position + len(text)
                with (self._folder / LOG_FILE).open("ab") as log:
                    log.write(text if text.endswith(b"\n") else text + b"\n")

    def append_remaining_output(self) -> None:
        """Add the rest, and the samples, once all nodes have ended."""
        self.append_new_output(whole_lines=False)
        with (self._folder / SAMPLES_FILE).open("ab") as file:
            for folder in self._read:
                file.writelines(_bytes_of(folder / SAMPLES_FILE).splitlines(keepends=True)[1:])


def _bytes_of(path: Path, position: int = 0) -> bytes:
    try:
        # Opened anew each time: a network file system shows what others wrote when it is opened.
        with path.open("rb") as file:
            file.seek(position)
            return file.read()
    except OSError:
        return b""
