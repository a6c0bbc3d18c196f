"""Node 0's side: waits for all nodes, checks that they run the same, and notices when one is lost.

A launcher that dies is noticed by its connection to the store, which its kernel closes at once; the
store itself does not report that, so this process's own connections are looked at. A machine that is
lost, or a launcher that no longer runs, closes nothing: its heartbeats stop.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tools.launch.background import BackgroundThread
from tools.launch.cluster.nodes import NodeFiles, Nodes
from tools.launch.cluster.rendezvous import messages
from tools.launch.cluster.rendezvous.messages import (
    CoordinatorRecord,
    NodeInfo,
    WorkerRecord,
    decode,
    encode,
)
from tools.launch.errors import LaunchError
from tools.records.run import RUN_FILE, Status, StatusRecord
from tools.spec.files import ROOT

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOK_SECONDS = 0.15
"""Longer than between two heartbeats, so that a look finds a new one unless something is wrong."""

STACK_SECONDS = 10.0
"""For a node to collect its ranks' stacks."""

END_SECONDS = 40.0
"""For the others to end after this node has."""

REFUSAL_SECONDS = 5.0
"""For the others to read why there is no run."""


@dataclass(frozen=True)
class _Worker:
    """A worker as it was last seen."""

    record: WorkerRecord
    beat: bytes
    own_address: str | None
    """This node's, by which the worker reaches it; None if its connection cannot be recognised."""
    silent_looks: int = 0
    """Without a new heartbeat; of a store that is slow to answer there are few."""
    lost: bool = False

    @property
    def ended(self) -> bool:
        return self.lost or self.record.exit_code is not None

    @property
    def exit_code(self) -> int:
        """Of a worker that has ended; one that was lost has failed."""
        return 1 if self.record.exit_code is None else self.record.exit_code


class Coordinator(BackgroundThread):
    """Serves the store while the `with` block runs. A `NodeGroup`."""

    _store: TCPStore
    _entrance: TCPStore | None
    """On MASTER_PORT, until all have come."""

    def __init__(
        self, nodes: Nodes, info: NodeInfo, timeout: float = messages.TIMEOUT_SECONDS
    ) -> None:
        """Listen at once: other nodes may come from now on.

        Raises:
            LaunchError: The port is taken.
        """
        self.cause: StatusRecord | None = None
        self._nodes = nodes
        self._info = info
        self._timeout = timeout
        self._others = range(1, nodes.count)
        self._workers: Mapping[int, _Worker] = {}
        self._files: NodeFiles | None = None
        self._record = self._published = CoordinatorRecord(nodes.count)
        self._entrance = messages.serve_store(nodes.port)
        self._store = messages.serve_store()
        self._store.set(messages.worker_key(0), encode(WorkerRecord(info)))  # NODE_RANK=0 is taken.
        self._store.set(messages.COORDINATOR_KEY, encode(self._record))
        for node in self._others:
            self._store.set(messages.worker_key(node), "")
            self._store.set(messages.beat_key(node), "0")
        self._entrance.set(messages.PORT_KEY, str(self._store.port))
        super().__init__()

    def stop(self) -> None:
        """As `BackgroundThread.stop`; no node can connect any more."""
        super().stop()
        # It listens as long as it is referred to, such as by an error's traceback.
        self._entrance = self._store = None  # type: ignore[assignment]

    def watch(self) -> None:
        """As `BackgroundThread.watch`."""
        last = False
        while not last:
            last = self.done.wait(LOOK_SECONDS)
            if self._record != self._published:
                self._published = self._record
                self._store.set(messages.COORDINATOR_KEY, encode(self._published))
            self._look()

    def gather(self) -> tuple[NodeInfo, ...]:
        """Wait for all others; all nodes in node order.

        Raises:
            LaunchError: One did not come, has something else than this node, or cannot run its share.
        """
        deadline = time.monotonic() + self._timeout
        while len(self._workers) < len(self._others):
            self._refuse_what_cannot_run()
            if time.monotonic() > deadline:
                self._refuse(self._missing())
            time.sleep(0.05)
        self._refuse_what_cannot_run()
        self._entrance = None  # torchrun listens there from now on.
        all_nodes = (self._info, *(self._workers[node].record.info for node in self._others))
        for other in all_nodes:
            if difference := _difference(self._info, other):
                self._refuse(difference)
        return all_nodes

    def interface(self) -> str | None:
        """The network interface by which the others reach this node."""
        addresses = (worker.own_address for worker in self._workers.values())
        return messages.interface_of(next((each for each in addresses if each), None))

    def announce(self, folder: Path) -> None:
        """Publish the run folder, and let all start once each has found it.

        Raises:
            LaunchError: One does not see it.
        """
        digest = hashlib.sha256((folder / RUN_FILE).read_bytes()).hexdigest()
        self._record = replace(self._record, folder=_named(folder), sha256=digest)

        def has_answered(worker: _Worker) -> bool:
            return worker.record.sees_folder or bool(worker.record.problem) or worker.ended

        self._wait_for_all(has_answered, 2 * messages.ANSWER_SECONDS)
        for node, worker in self._workers.items():
            if not worker.record.sees_folder:
                problem = worker.record.problem or "it gave no answer"
                self._refuse(f"{self._name(node)} cannot start: {problem}.")
        self._files = NodeFiles(folder, tuple(self._workers))
        self._record = replace(self._record, started=True)

    def refuse(self, reason: str) -> None:
        """Stop the other nodes before they have started, and wait until they know why."""
        self._record = replace(self._record, refused=reason)
        self._wait_for_all(
            lambda worker: worker.ended or bool(worker.record.problem), REFUSAL_SECONDS
        )

    def failure(self) -> str | None:
        """As `NodeGroup.failure`; also brings over what the others have logged."""
        if self._files is not None:
            self._files.bring()
        workers = self._workers.items()
        failed = {node: worker for node, worker in workers if worker.ended and worker.exit_code}
        for node, worker in failed.items():
            self.cause = self.cause or self._cause_of(node, worker)
        if self.cause is not None:
            return self.cause.reason
        ended = (f"{self._name(node)} ended with {failed[node].exit_code}." for node in failed)
        return next(ended, None)

    def hangs(self, is_stalled: bool) -> bool:
        """As `NodeGroup.hangs`: this node's log has the lines of all."""
        return is_stalled

    def stopped(self, own: Sequence[int]) -> Sequence[int]:
        """As `NodeGroup.stopped`: asks the others, which then end."""
        self._record = replace(self._record, hangs=True)
        self._wait_for_all(
            lambda worker: worker.record.stopped_ranks is not None or worker.ended, STACK_SECONDS
        )
        theirs = (worker.record.stopped_ranks or () for worker in self._workers.values())
        return sorted((*own, *(rank for ranks in theirs for rank in ranks)))

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        """As `NodeGroup.finish`; the first failure's exit code."""
        self._record = replace(self._record, exit_code=exit_code)
        self._wait_for_all(lambda worker: worker.ended, END_SECONDS)
        self.failure()
        if self._files is not None:
            self._files.complete()
        codes = (worker.exit_code for worker in self._workers.values() if worker.ended)
        return exit_code or next((code for code in codes if code), 0)

    def _look(self) -> None:
        """Read what the others have written."""
        count = len(self._others)
        keys = [*map(messages.worker_key, self._others), *map(messages.beat_key, self._others)]
        values = self._store.multi_get(keys)
        seen = zip(self._others, values[:count], values[count:], strict=True)
        found = {node: self._see(node, record, beat) for node, record, beat in seen}
        self._workers = {node: worker for node, worker in found.items() if worker is not None}

    def _see(self, node: int, data: bytes, beat: bytes) -> _Worker | None:
        known = self._workers.get(node)
        record = decode(data, WorkerRecord) or (known.record if known else None)
        if record is None or (known is not None and known.lost):
            return known
        if known is None:
            own = messages.served_connections(self._store.port).get(record.connection)
            return _Worker(record, beat, own)
        if beat != known.beat:
            return replace(known, record=record, beat=beat, silent_looks=0)
        own = known.own_address
        if own and record.connection not in messages.served_connections(self._store.port):
            # What it wrote before it went may be newer than what was read.
            last = decode(self._store.get(messages.worker_key(node)), WorkerRecord)
            return replace(known, record=last or record, lost=True)
        silent = known.silent_looks + 1
        lost = silent * LOOK_SECONDS > messages.SILENT_SECONDS
        return replace(known, record=record, silent_looks=silent, lost=lost)

    def _wait_for_all(self, condition: Callable[[_Worker], bool], seconds: float) -> None:
        messages.wait_until(lambda: all(map(condition, self._workers.values())), seconds)

    def _cause_of(self, node: int, worker: _Worker) -> StatusRecord | None:
        """How a worker has ended, where no log says so."""
        if worker.record.cause is not None:
            reason = f"{self._name(node)}: {worker.record.cause.reason}"
            return replace(worker.record.cause, reason=reason)
        if worker.record.exit_code is None:
            reason = f"{self._name(node)} was lost: its launcher is gone."
            return StatusRecord(Status.CRASHED, None, reason)
        return None

    def _refuse_what_cannot_run(self) -> None:
        for node, worker in self._workers.items():
            if worker.record.problem:
                self._refuse(f"{self._name(node)}: {worker.record.problem}")
            if worker.ended:
                self._refuse(f"{self._name(node)} was lost before the run began; start all again.")

    def _missing(self) -> str:
        missing = [node for node in self._others if node not in self._workers]
        names = ", ".join(map(str, missing))
        return (
            f"Node {names} of {self._nodes.count} did not come to {self._nodes.address}, port "
            f"{self._nodes.port}, within {self._timeout:.0f} s; start it there with "
            f"NODE_RANK={missing[0]}, and see that the port is open between the hosts."
        )

    def _name(self, node: int) -> str:
        return f"Node {node} ({self._workers[node].record.info.host})"

    def _refuse(self, reason: str) -> None:
        self.refuse(reason)
        raise LaunchError(reason)


def _difference(own: NodeInfo, other: NodeInfo) -> str | None:
    for name, value in own.has.items():
        theirs = other.has.get(name)
        if theirs != value:
            return (
                f"Node {other.node} ({other.host}) has {name} {theirs}, and node 0 ({own.host}) "
                f"{value}; all nodes must have the same."
            )
    return None


def _named(folder: Path) -> str:
    resolved = folder.resolve()
    return str(resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else resolved)
