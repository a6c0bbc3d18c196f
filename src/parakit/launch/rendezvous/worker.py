"""The side of every node but node 0: reach node 0, join its run, and notice when that run ends.

A thread of its own does all access to the store. Some calls of torch wait without end if the machine of node 0 is
lost, or if another program listens at its address.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from parakit.artifacts.run import LOG_FILE, RUN_FILE, Status, StatusRecord
from parakit.cluster import NodeGroup, Nodes, node_folder
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.launch.background import BackgroundThread
from parakit.launch.rendezvous import messages
from parakit.launch.rendezvous.messages import NodeRecord, RunState, decode, encode, node_key
from parakit.launch.supervise import exit_status
from parakit.launch.supervise.interruption import raise_if_stop_requested
from parakit.logs import diagnose_log

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_GONE = StatusRecord(Status.CRASHED, None, "its launcher is gone.")


class Worker(BackgroundThread, NodeGroup):
    """The node group of any node but node 0. The node stays in contact with node 0 during a `with` block."""

    stop_seconds = 2.0

    def __init__(
        self, nodes: Nodes, record: NodeRecord, timeout: float = messages.TIMEOUT_SECONDS
    ) -> None:
        """Wait until something listens at node 0's address.

        Raises:
            LaunchError: Nothing listens there in time, or torch is not installed.
        """
        messages.load_torch()
        self._nodes = nodes
        self._timeout = max(timeout, messages.ANSWER_SECONDS)
        self._address, node_0 = _connect_to_node_0(nodes, timeout)
        self._record = replace(record, reaches=node_0)
        self._state: RunState | None = None
        self._refused: str | None = None
        self._answered = time.monotonic()
        self._failed: str | None = None
        self._folder: Path | None = None
        self._kills_before = exit_status.count_memory_kills()
        super().__init__()

    def stop(self) -> None:
        """Stop the thread; a node that has not finished is reported to node 0 as gone."""
        if self._record.exit_code is None:
            self._record = replace(self._record, exit_code=1, cause=_GONE)
        super().stop()

    def _watch(self) -> None:
        try:
            store = messages.open_store(self._nodes.address, self._nodes.port)
            self._refused = self._claim_node_rank(store) or self._record.problem
            last = False
            while not last and self._refused is None:
                last = self.done.wait(messages.BEAT_SECONDS)
                self._send_heartbeat(store)
        except RuntimeError:  # The connection has ended, or another program answers.
            self._answered = -math.inf

    def join(self) -> tuple[Path, Nodes]:
        """Wait for the run folder, and until all nodes may start; return the folder and the nodes.

        Raises:
            LaunchError: Node 0 refuses the run, is gone, or made a folder that this node does not see.
        """
        state = self._wait_for_node_0("folder")
        folder = ROOT / str(state.folder)
        # A network file system may show the folder late.
        sees_folder = messages.wait_until(
            lambda: messages.hash_if_present(folder / RUN_FILE) == state.sha256,
            messages.ANSWER_SECONDS,
        )
        problem = None
        if not sees_folder:
            problem = (
                f"it does not see {folder}, which node 0 has made; RUNS= must name a folder that all "
                "hosts share"
            )
        self._record = replace(self._record, sees_folder=sees_folder, problem=problem)
        self._wait_for_node_0("started")
        self._folder = node_folder(folder, self._nodes.rank)
        interface = messages.find_interface(self._address)
        nodes = replace(
            self._nodes,
            port=state.torchrun_port,
            interface=interface,
            local_address=self._address if interface else None,
        )
        return folder, nodes

    def find_failure(self) -> str | None:
        """Return a sentence if node 0 has ended the run or was lost; None while it runs."""
        if self._failed is None:
            if self._state is not None and self._state.exit_code:
                self._failed = "Node 0 has ended the run."
            elif self._is_lost():
                self._failed = "Node 0 was lost."
        return self._failed

    def is_hanging(self, is_stalled: bool) -> bool:  # noqa: ARG002 - a node may have nothing to log
        """Return True if node 0 reports that the run hangs."""
        return self._state is not None and self._state.hangs

    def wait_for_stacks(self, stopped_ranks: Sequence[int]) -> Sequence[int]:
        """Report this node's stopped ranks to node 0 and return them; node 0 collects those of all nodes."""
        self._record = replace(self._record, stopped_ranks=tuple(stopped_ranks))
        return stopped_ranks

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:
        """Report this node's exit code to node 0, after everything of this node is on the disk; return the code."""
        cause = None if self._failed else self._explain_unlogged_end(exit_code, error)
        self._record = replace(self._record, exit_code=exit_code, cause=cause)
        return exit_code

    def _claim_node_rank(self, store: TCPStore) -> str | None:
        """Write this node's record under its NODE_RANK; return a sentence if that is not possible, else None."""
        rank = self._nodes.rank
        self._read_state(store)  # This waits until node 0 has written the state.
        if self._state is not None and rank >= self._state.nodes:
            return f"NODE_RANK={rank} is not below NNODES={self._state.nodes}."
        encoded = encode(self._record)
        # The store sets the key only if it is empty, and returns the value that the key has then.
        value = store.compare_set(node_key(rank), "", encoded)
        if value == encoded.encode():
            return None
        holder = decode(value, NodeRecord)
        holder_name = f"host {holder.host}" if holder else "another program"
        return f"NODE_RANK={rank} is taken by {holder_name}; give each host its own."

    def _send_heartbeat(self, store: TCPStore) -> None:
        """Write this node's record as its heartbeat, and read what node 0 reports."""
        beat = replace(self._record, beat=time.monotonic_ns())
        store.set(node_key(self._nodes.rank), encode(beat))
        self._read_state(store)

    def _read_state(self, store: TCPStore) -> None:
        """Read the state that node 0 reports, and note the time of its answer."""
        self._state = decode(store.get(messages.RUN_KEY), RunState) or self._state
        self._answered = time.monotonic()

    def _is_lost(self) -> bool:
        """Return True if node 0 has not answered for so long that it counts as lost.

        Before the run starts the limit is longer, because the resolver may delay node 0 while hosts connect.
        """
        limit = self._timeout if self._folder is None else messages.ANSWER_SECONDS
        return time.monotonic() - self._answered > limit

    def _wait_for_node_0(self, name: str) -> RunState:
        """Wait until the field `name` of node 0's state has a value, and return the state.

        Raises:
            LaunchError: Node 0 refuses the run, or is gone.
        """
        while True:
            raise_if_stop_requested()
            state = self._state
            refused = self._refused or (state.refused if state else None)
            if refused:
                raise LaunchError(refused)
            if state is not None and getattr(state, name):
                return state
            if self._is_lost():
                reason = "is gone" if state else "gives no answer: something else may listen there"
                raise LaunchError(
                    f"Node 0 at {self._nodes.address}, port {self._nodes.port}, {reason}; "
                    "see what it says, and start it with NODE_RANK=0."
                )
            time.sleep(0.05)

    def _explain_unlogged_end(
        self, exit_code: int, error: BaseException | None
    ) -> StatusRecord | None:
        """Return how this node ended, if node 0 cannot see it in this node's log; otherwise None."""
        if isinstance(error, Exception):
            reason = str(error) or type(error).__name__
            return StatusRecord(Status.CRASHED, None, reason, getattr(error, "rank", None))
        if error is not None:
            return StatusRecord(Status.INTERRUPTED, None, "its launcher was asked to stop.")
        if exit_code == 0 or self._folder is None:
            return None
        status_by_log = diagnose_log(self._folder / LOG_FILE, exit_code, interrupted=False)
        status = exit_status.classify_exit(self._folder, exit_code, False, self._kills_before)
        return status if status != status_by_log else None


def _connect_to_node_0(nodes: Nodes, timeout: float) -> tuple[str, str]:
    """Wait until something listens at node 0's address; return this machine's address and node 0's.

    This is a plain connection, because torch ignores a request to stop while it waits for a connection.

    Raises:
        LaunchError: Nothing listens there within the time.
    """
    is_local = messages.is_local_address(nodes.address)
    seconds = min(timeout, messages.HERE_SECONDS) if is_local else timeout
    hint = (
        "the machine of MASTER_ADDR= is this one" if is_local else "see that the address is right"
    )
    deadline = time.monotonic() + seconds
    while True:
        raise_if_stop_requested()
        try:
            address = (nodes.address, nodes.port)
            with socket.create_connection(address, timeout=messages.ANSWER_SECONDS) as connection:
                return str(connection.getsockname()[0]), str(connection.getpeername()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Node 0 was not reached at MASTER_ADDR={nodes.address}, port {nodes.port}, "
                    f"within {seconds:.0f} s ({error.strerror or error}); start it with NODE_RANK=0 "
                    f"({hint}), and see that the port is open."
                ) from None
        time.sleep(0.2)
