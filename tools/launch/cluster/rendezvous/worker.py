"""The side of every node but 0: reaches node 0, joins its run, and notices when that ends.

All access to the store is in a thread of its own, because torch waits in some calls without
end: for a node 0 whose machine is lost, and for something else that listens at its address.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tools.launch.background import BackgroundThread
from tools.launch.cluster.nodes import Nodes, node_folder
from tools.launch.cluster.rendezvous import messages
from tools.launch.cluster.rendezvous.messages import (
    CoordinatorRecord,
    NodeInfo,
    WorkerRecord,
    decode,
    encode,
)
from tools.launch.errors import LaunchError
from tools.launch.supervise import exit_status
from tools.records.run import LOG_FILE, RUN_FILE, Status, StatusRecord
from tools.report.read.diagnosis import diagnose
from tools.spec.files import ROOT

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

STOP_SECONDS = 2.0


class Worker(BackgroundThread):
    """Keeps in contact with node 0 while the `with` block runs. A `NodeGroup`."""

    cause = None

    def __init__(
        self, nodes: Nodes, info: NodeInfo, timeout: float = messages.TIMEOUT_SECONDS
    ) -> None:
        """Wait until something listens at node 0's address.

        Raises:
            LaunchError: Nothing does.
        """
        messages.load_torch()
        self._nodes = nodes
        self._timeout = max(timeout, messages.ANSWER_SECONDS)
        self._address = _own_address_towards(nodes, timeout)
        self._record = WorkerRecord(info)
        self._published: WorkerRecord | None = None
        self._ports = [nodes.port]
        self._connection = ""
        self._introduced = False
        self._theirs: CoordinatorRecord | None = None
        self._refused: str | None = None
        self._began = time.monotonic()
        self._lost = False
        self._failed: str | None = None
        self._folder: Path | None = None
        self._kills_before = exit_status.memory_kills()
        super().__init__()

    def stop(self) -> None:
        """As `BackgroundThread.stop`; node 0 is given little time to answer."""
        self.done.set()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            # Python aborts where a thread comes back from torch while it ends.
            for port in self._ports:
                messages.break_connections(port)
            self._thread.join(STOP_SECONDS)

    def watch(self) -> None:
        """As `BackgroundThread.watch`."""
        try:
            store = self._connect()
            last = False
            while not last and self._refused is None:
                last = self.done.wait(messages.BEAT_SECONDS)
                self._exchange(store)
        except (RuntimeError, ValueError):  # The connection has ended, or is with another store.
            self._lost = True

    def introduce(self, problem: str | None = None) -> None:
        """Say who this is, and why it cannot run its share if it cannot."""
        self._record = replace(self._record, problem=problem)
        self._introduced = True

    def interface(self) -> str | None:
        """The network interface by which node 0 is reached."""
        return messages.interface_of(self._address)

    def join(self) -> Path:
        """Wait for the run folder, and until all may start.

        Raises:
            LaunchError: Node 0 refuses, is gone, or its folder is not seen from here.
        """
        record = self._wait_for_node_0("folder")
        folder = ROOT / str(record.folder)
        if _appears(folder / RUN_FILE, record.sha256):
            self._record = replace(self._record, sees_folder=True)
        else:
            problem = f"it does not see {folder}, which node 0 has made"
            problem += "; RUNS= must name a folder that all hosts share"
            self._record = replace(self._record, problem=problem)
        self._wait_for_node_0("started")
        self._folder = node_folder(folder, self._nodes.rank)
        return folder

    def announce(self, folder: Path) -> None:
        """Node 0 does."""

    def failure(self) -> str | None:
        """As `NodeGroup.failure`."""
        if self._failed is None:
            if self._theirs is not None and self._theirs.exit_code:
                self._failed = "Node 0 has ended the run."
            elif self._lost:
                self._failed = "Node 0 was lost."
        return self._failed

    def hangs(self, is_stalled: bool) -> bool:  # noqa: ARG002 - a node may have nothing to log
        """As `NodeGroup.hangs`: whether node 0 reports it."""
        return self._theirs is not None and self._theirs.hangs

    def stopped(self, own: Sequence[int]) -> Sequence[int]:
        """As `NodeGroup.stopped`: reports to node 0."""
        self._record = replace(self._record, stopped_ranks=tuple(own))
        return own

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:
        """As `NodeGroup.finish`; everything of this node is on the disk."""
        cause = None if self._failed else self._unlogged(exit_code, error)
        self._record = replace(self._record, exit_code=exit_code, cause=cause)
        return exit_code

    def _connect(self) -> TCPStore:
        address = self._nodes.address
        entrance = messages.reach_store(address, self._nodes.port)
        port = int(entrance.get(messages.PORT_KEY))
        self._ports.append(port)
        before = messages.watch_connections(port)
        store = messages.reach_store(address, port)
        own = messages.watch_connections(port) - before
        self._connection = min(own, default="")
        return store

    def _exchange(self, store: TCPStore) -> None:
        """Write this node's record and heartbeat, and read node 0's record."""
        record = replace(self._record, connection=self._connection)
        if self._introduced and record != self._published:
            self._publish(store, record)
        store.add(messages.beat_key(self._nodes.rank), 1)
        self._theirs = decode(store.get(messages.COORDINATOR_KEY), CoordinatorRecord)

    def _publish(self, store: TCPStore, record: WorkerRecord) -> None:
        key, data = messages.worker_key(self._nodes.rank), encode(record)
        if self._published is None:
            self._refused = self._claim(store, key, data)
        else:
            store.set(key, data)
        self._published = record

    def _claim(self, store: TCPStore, key: str, data: str) -> str | None:
        """Take this node's place in the run; why that cannot be, if so."""
        rank = self._nodes.rank
        theirs = decode(store.get(messages.COORDINATOR_KEY), CoordinatorRecord)
        if theirs is not None and rank >= theirs.nodes:
            return f"NODE_RANK={rank} is not below NNODES={theirs.nodes}."
        holds = store.compare_set(key, "", data)
        if holds == data.encode():
            return None
        other = decode(holds, WorkerRecord)
        whose = f"host {other.info.host}" if other else "something else"
        return f"NODE_RANK={rank} is taken by {whose}; give each host its own."

    def _wait_for_node_0(self, name: str) -> CoordinatorRecord:
        """Wait until a field of node 0's record has a value."""
        while True:
            theirs = self._theirs
            refused = self._refused or (theirs.refused if theirs else None)
            if refused:
                raise LaunchError(refused)
            if theirs is not None and getattr(theirs, name):
                return theirs
            unknown = theirs is None and time.monotonic() - self._began > self._timeout
            if self._lost or unknown:
                reason = "is gone" if theirs else "gives no answer: something else may listen there"
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
        logged = diagnose(self._folder / LOG_FILE, exit_code, interrupted=False)
        known = exit_status.classify_exit(self._folder, exit_code, False, self._kills_before)
        return known if known != logged else None


def _own_address_towards(nodes: Nodes, timeout: float) -> str:
    """Wait until something listens at node 0's address; this machine's address in between.

    A plain connection, because torch ignores a request to stop while it waits for one.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            place = (nodes.address, nodes.port)
            with socket.create_connection(place, timeout=messages.ANSWER_SECONDS) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Node 0 was not reached at MASTER_ADDR={nodes.address}, port {nodes.port}, "
                    f"within {timeout:.0f} s ({error.strerror or error}); start it with NODE_RANK=0, "
                    "and see that the address is right and the port open."
                ) from None
        time.sleep(0.2)


def _appears(file: Path, digest: str) -> bool:
    """Whether a file with these bytes is there; a network file system may show it late."""

    def is_there() -> bool:
        try:
            return hashlib.sha256(file.read_bytes()).hexdigest() == digest
        except OSError:
            return False

    return messages.wait_until(is_there, messages.ANSWER_SECONDS)
