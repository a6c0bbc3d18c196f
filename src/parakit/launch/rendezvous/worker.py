"""The side of every node but 0: reaches node 0, joins its run, and notices when that ends.

All access to the store is in a thread of its own, because torch waits in some calls without
end: for a node 0 whose machine is lost, and for something else that listens at its address.
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
    """Keeps in contact with node 0 while the `with` block runs."""

    stop_seconds = 2.0

    def __init__(
        self, nodes: Nodes, own: NodeRecord, timeout: float = messages.TIMEOUT_SECONDS
    ) -> None:
        """Wait until something listens at node 0's address.

        Raises:
            LaunchError: Nothing does, or torch is not installed.
        """
        messages.load_torch()
        self._nodes = nodes
        self._timeout = max(timeout, messages.ANSWER_SECONDS)
        self._address, node_0 = _addresses(nodes, timeout)
        self._record = replace(own, reaches=node_0)
        self._state: RunState | None = None
        self._refused: str | None = None
        self._answered = time.monotonic()
        self._failed: str | None = None
        self._folder: Path | None = None
        self._kills_before = exit_status.count_memory_kills()
        super().__init__()

    def stop(self) -> None:
        """As `BackgroundThread.stop`; a node that has not finished is gone."""
        if self._record.exit_code is None:
            self._record = replace(self._record, exit_code=1, cause=_GONE)
        super().stop()

    def _watch(self) -> None:
        try:
            store = messages.open_store(self._nodes.address, self._nodes.port)
            self._refused = self._claim(store) or self._record.problem
            last = False
            while not last and self._refused is None:
                last = self.done.wait(messages.BEAT_SECONDS)
                self._exchange(store)
        except RuntimeError:  # The connection has ended, or is with something else.
            self._answered = -math.inf

    def join(self) -> tuple[Path, Nodes]:
        """Wait for the run folder, and until all may start; the folder and the nodes.

        Raises:
            LaunchError: Node 0 refuses, is gone, or its folder is not seen from here.
        """
        state = self._wait_for_node_0("folder")
        folder = ROOT / str(state.folder)
        # A network file system may show it late.
        seen = messages.wait_until(
            lambda: messages.hash_if_present(folder / RUN_FILE) == state.sha256,
            messages.ANSWER_SECONDS,
        )
        unseen = f"it does not see {folder}, which node 0 has made"
        problem = f"{unseen}; RUNS= must name a folder that all hosts share"
        self._record = replace(self._record, sees_folder=seen, problem=None if seen else problem)
        self._wait_for_node_0("started")
        self._folder = node_folder(folder, self._nodes.rank)
        interface = messages.find_interface(self._address)
        here = replace(self._nodes, port=state.torchrun_port, interface=interface)
        return folder, replace(here, local_address=self._address if interface else None)

    def find_failure(self) -> str | None:
        """As `NodeGroup.find_failure`."""
        if self._failed is None:
            if self._state is not None and self._state.exit_code:
                self._failed = "Node 0 has ended the run."
            elif self._is_lost():
                self._failed = "Node 0 was lost."
        return self._failed

    def is_hanging(self, is_stalled: bool) -> bool:  # noqa: ARG002 - a node may have nothing to log
        """As `NodeGroup.is_hanging`: whether node 0 reports it."""
        return self._state is not None and self._state.hangs

    def wait_for_stacks(self, stopped_ranks: Sequence[int]) -> Sequence[int]:
        """As `NodeGroup.wait_for_stacks`: reports to node 0."""
        self._record = replace(self._record, stopped_ranks=tuple(stopped_ranks))
        return stopped_ranks

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:
        """As `NodeGroup.finish`; everything of this node is on the disk."""
        cause = None if self._failed else self._unlogged(exit_code, error)
        self._record = replace(self._record, exit_code=exit_code, cause=cause)
        return exit_code

    def _claim(self, store: TCPStore) -> str | None:
        """Take this node's place in the run; why that cannot be, if so."""
        rank = self._nodes.rank
        self._read_state(store)  # Waits until node 0 has it there.
        if self._state is not None and rank >= self._state.nodes:
            return f"NODE_RANK={rank} is not below NNODES={self._state.nodes}."
        own = encode(self._record)
        holds = store.compare_set(node_key(rank), "", own)
        if holds == own.encode():
            return None
        other = decode(holds, NodeRecord)
        whose = f"host {other.host}" if other else "something else"
        return f"NODE_RANK={rank} is taken by {whose}; give each host its own."

    def _exchange(self, store: TCPStore) -> None:
        """Write this node's record as its heartbeat, and read what node 0 reports."""
        beat = replace(self._record, beat=time.monotonic_ns())
        store.set(node_key(self._nodes.rank), encode(beat))
        self._read_state(store)

    def _read_state(self, store: TCPStore) -> None:
        self._state = decode(store.get(messages.RUN_KEY), RunState) or self._state
        self._answered = time.monotonic()

    def _is_lost(self) -> bool:
        """Whether node 0 is; while hosts connect, the resolver may delay its answers for long."""
        limit = self._timeout if self._folder is None else messages.ANSWER_SECONDS
        return time.monotonic() - self._answered > limit

    def _wait_for_node_0(self, name: str) -> RunState:
        """Wait until a field of what node 0 reports has a value."""
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

    def _unlogged(self, exit_code: int, error: BaseException | None) -> StatusRecord | None:
        """How this node ended, where its log, which node 0 has too, does not say so."""
        if isinstance(error, Exception):
            reason = str(error) or type(error).__name__
            return StatusRecord(Status.CRASHED, None, reason, getattr(error, "rank", None))
        if error is not None:
            return StatusRecord(Status.INTERRUPTED, None, "its launcher was asked to stop.")
        if exit_code == 0 or self._folder is None:
            return None
        logged = diagnose_log(self._folder / LOG_FILE, exit_code, interrupted=False)
        known = exit_status.classify_exit(self._folder, exit_code, False, self._kills_before)
        return known if known != logged else None


def _addresses(nodes: Nodes, timeout: float) -> tuple[str, str]:
    """Wait until something listens at node 0's address; this machine's and node 0's in between.

    A plain connection, because torch ignores a request to stop while it waits for one.
    """
    here = messages.is_local_address(nodes.address)
    seconds = min(timeout, messages.HERE_SECONDS) if here else timeout
    whose = "the machine of MASTER_ADDR= is this one" if here else "see that the address is right"
    deadline = time.monotonic() + seconds
    while True:
        raise_if_stop_requested()
        try:
            place = (nodes.address, nodes.port)
            with socket.create_connection(place, timeout=messages.ANSWER_SECONDS) as connection:
                return str(connection.getsockname()[0]), str(connection.getpeername()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Node 0 was not reached at MASTER_ADDR={nodes.address}, port {nodes.port}, "
                    f"within {seconds:.0f} s ({error.strerror or error}); start it with NODE_RANK=0 "
                    f"({whose}), and see that the port is open."
                ) from None
        time.sleep(0.2)
