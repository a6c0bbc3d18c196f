"""Runs over several nodes: a node's number and addresses, its launcher's duties, and where each node writes.

Node 0 owns the run folder. Its log receives the log lines of all nodes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from parakit.artifacts.run import LOG_FILE, NODES_FOLDER, SAMPLES_FILE, StatusRecord
from parakit.config.errors import LaunchError
from parakit.config.settings import MASTER_PORT

DEFAULT_PORT: int = MASTER_PORT.default


class Rendezvous(StrEnum):
    """torchrun's ways to number the nodes: STATIC by their --node-rank, C10D in the order in which they come."""

    STATIC = "static"
    C10D = "c10d"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, seen from one of them."""

    count: int
    rank: int
    """The number of this node. Node 0 owns the run folder."""
    address: str
    """The address of node 0, to which all nodes connect."""
    port: int = DEFAULT_PORT
    rendezvous: Rendezvous = Rendezvous.STATIC
    hosts: tuple[str, ...] = ()
    """The names of all nodes, in node order; empty until all have come."""
    interface: str | None = None
    """This machine's network interface to the other nodes.

    None until all have come, and if addresses are translated.
    """
    local_address: str | None = None
    """This machine's address on that interface, at which the other nodes reach it."""

    def torchrun_flags(self, ranks_per_node: int) -> tuple[str, ...]:
        """Return torchrun's flags for this node, which runs `ranks_per_node` ranks."""
        sizes = ("--nnodes", str(self.count), "--nproc-per-node", str(ranks_per_node))
        if self.rendezvous is Rendezvous.STATIC:
            master = ("--master-addr", self.address, "--master-port", str(self.port))
            return (*sizes, "--node-rank", str(self.rank), *master)
        endpoint = ("--rdzv-endpoint", f"{self.address}:{self.port}", "--rdzv-id", str(self.port))
        # Without `is_host` torchrun guesses from the machine's name which node opens the store.
        is_host = 1 if self.rank == 0 else 0
        store = ("--rdzv-conf", f"is_host={is_host}")
        # torchrun may number any node as the first. Its ranks' address is then what that node calls itself.
        local = ("--local-addr", self.local_address) if self.local_address else ()
        return (*sizes, "--rdzv-backend", "c10d", *endpoint, *store, *local)


class NodeGroup:
    """Common actions of the launchers of all nodes while their ranks train.

    This class is for a run on one node, where there is nothing to do. Runs over several nodes override the
    methods.
    """

    cause: StatusRecord | None = None
    """The end of another node, if that ended the run and no log shows it; else None."""

    def announce(self, folder: Path) -> None:
        """Tell the other nodes that the run folder exists, so that they start."""

    def find_failure(self) -> str | None:
        """Return a sentence on why this node must stop; None if it must not.

        The launcher calls this several times per second.
        """
        return None

    def is_hanging(self, is_stalled: bool) -> bool:
        """Return True if the run hangs.

        This method returns `is_stalled`, which decides on node 0 or on the only node. Other nodes override the method
        and return the decision of node 0, whose log receives the lines of all nodes.

        Args:
            is_stalled: True if this node's log has not grown for the timeout. Other nodes do not use it: Megatron
                prints on its last rank alone, so the log of another node may never grow.
        """
        return is_stalled

    def wait_for_stacks(self, stopped_ranks: Sequence[int]) -> Sequence[int]:
        """Wait until all nodes have collected the stacks of their ranks; return the stopped ranks of all nodes.

        Args:
            stopped_ranks: The stopped ranks of this node.
        """
        return stopped_ranks

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        """Report how this node ended, wait for the other nodes, and return the exit code of the run.

        Args:
            exit_code: torchrun's exit code; not 0 if the launcher did not wait for torchrun.
            error: The exception that ended the launcher; None without one.
        """
        return exit_code


SINGLE_NODE = NodeGroup()


def parse_nodes(arguments: Namespace) -> Nodes | None:
    """Return the nodes of a run from NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and RENDEZVOUS.

    None means that the run is on one machine.

    Raises:
        LaunchError: NODE_RANK or MASTER_ADDR is missing, or NODE_RANK is out of range.
    """
    count = getattr(arguments, "nnodes", None)
    if count is None or count == 1:
        return None
    rank, address = arguments.node_rank, arguments.master_addr
    if rank is not None:
        is_in_range = rank.isdecimal() and int(rank) < count
        if not is_in_range:
            raise LaunchError(f"NODE_RANK={rank} is not a whole number from 0 to {count - 1}.")
    if rank is None or not address:
        raise LaunchError(
            f"NNODES={count} needs NODE_RANK=, 0 to {count - 1}, different on each host, and "
            "MASTER_ADDR=, the address of the host with NODE_RANK=0; set both."
        )
    rendezvous = Rendezvous(arguments.rendezvous or Rendezvous.STATIC)
    port = arguments.master_port or DEFAULT_PORT
    return Nodes(count, int(rank), address, port=port, rendezvous=rendezvous)


def node_folder(run_folder: Path, node: int) -> Path:
    """Return the folder in which a node other than 0 writes its log and samples."""
    return run_folder / NODES_FOLDER / str(node)


class NodeFiles:
    """Logs and samples of other nodes, which node 0 appends to its own.

    Create the object before the other nodes start. What their files hold at that time is from an earlier attempt,
    and is not appended.
    """

    def __init__(self, folder: Path, nodes: Sequence[int]) -> None:
        self._folder = folder
        node_folders = [node_folder(folder, node) for node in nodes]
        self._log_positions = {path: len(_read_bytes(path / LOG_FILE)) for path in node_folders}

    def append_new_output(self, whole_lines: bool = True) -> None:
        """Append new log lines of the other nodes, since the last call, to node 0's log.

        Args:
            whole_lines: True leaves an unfinished last line for the next call.
        """
        for folder, position in self._log_positions.items():
            text = _read_bytes(folder / LOG_FILE, position)
            if whole_lines:
                end_of_last_line = text.rfind(b"\n") + 1
                text = text[:end_of_last_line]
            if not text:
                continue
            self._log_positions[folder] = position + len(text)
            ending = b"" if text.endswith(b"\n") else b"\n"
            with (self._folder / LOG_FILE).open("ab") as log:
                log.write(text + ending)

    def append_remaining_output(self) -> None:
        """Append the last log lines and all samples, once all nodes have ended."""
        self.append_new_output(whole_lines=False)
        with (self._folder / SAMPLES_FILE).open("ab") as file:
            for folder in self._log_positions:
                lines = _read_bytes(folder / SAMPLES_FILE).splitlines(keepends=True)
                file.writelines(lines[1:])  # The first line is the header.


def _read_bytes(path: Path, position: int = 0) -> bytes:
    """Return the content of a file from a byte position on; empty if the file cannot be read.

    The file is opened anew each time, because a network file system shows the writes of other machines only when
    a file is opened.
    """
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read()
    except OSError:
        return b""
