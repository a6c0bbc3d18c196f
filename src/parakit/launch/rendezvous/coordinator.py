"""Node 0's side: wait for all nodes, check that they run the same, and notice when one is lost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from parakit.artifacts.run import RUN_FILE, Status, StatusRecord
from parakit.cluster import NodeFiles, NodeGroup, Nodes
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.launch.background import BackgroundThread
from parakit.launch.rendezvous import messages
from parakit.launch.rendezvous.messages import NodeRecord, RunState, decode, encode, node_key
from parakit.launch.supervise.interruption import raise_if_stop_requested
from parakit.launch.supervise.warm import find_free_port

STACK_SECONDS = 10.0
"""Longest wait for the other nodes to collect their ranks' stacks."""

END_SECONDS = 40.0
"""Longest wait for the other nodes to end after this one."""

REFUSAL_SECONDS = 5.0
"""Longest wait for the other nodes to read why there is no run."""

_LOST = StatusRecord(Status.CRASHED, None, "it was lost: its launcher gives no sign.")


class Coordinator(BackgroundThread, NodeGroup):
    """The node group of node 0, which serves the store during a `with` block."""

    stop_seconds = messages.ANSWER_SECONDS

    def __init__(
        self, nodes: Nodes, record: NodeRecord, timeout: float = messages.TIMEOUT_SECONDS
    ) -> None:
        """Serve the store at once, so that other nodes can connect from now on.

        Raises:
            LaunchError: The port is taken, or torch is not installed.
        """
        self._nodes = nodes
        # The time makes this record differ from that of any other node 0.
        self._node_0_record = replace(record, beat=time.time_ns())
        self._timeout = timeout
        self._records: dict[int, NodeRecord] = {}
        self._silent_looks = dict.fromkeys(range(1, nodes.count), 0)
        """Checks since a node's last heartbeat. Checks are counted, because a slow store delays heartbeats
        and checks alike."""
        self._files: NodeFiles | None = None
        self._state = RunState(nodes.count)
        try:
            self._store = messages.open_store("127.0.0.1", nodes.port, is_master=True)
        except RuntimeError as error:
            reason = str(error).rpartition("message: ")[2].splitlines()[0]
            raise LaunchError(
                f"MASTER_PORT={nodes.port} cannot be listened on ({reason}); end what uses it, or name "
                "another, the same on all hosts."
            ) from None
        # This key tells every other host that NODE_RANK=0 is taken.
        self._store.set(node_key(0), encode(self._node_0_record))
        self._next_look = math.inf if messages.is_local_address(nodes.address) else 0.0
        for node in self._silent_looks:
            self._store.set(node_key(node), "")
        # Other nodes wait for this key before they write anything.
        self._store.set(messages.RUN_KEY, encode(self._state))
        super().__init__()

    def stop(self) -> None:
        """Stop the thread and close the store, so that no node can connect any more."""
        super().stop()
        # The store listens while anything refers to it, and an error's traceback refers to this object.
        del self._store

    def _watch(self) -> None:
        store, last = self._store, False
        while not last:
            last = self.done.wait(messages.BEAT_SECONDS)
            store.set(messages.RUN_KEY, encode(self._state))
            self._read_records(store.multi_get([node_key(node) for node in self._silent_looks]))

    def gather(self) -> Nodes:
        """Wait for all other nodes and return the nodes with hosts, port and network interface filled in.

        Raises:
            LaunchError: A node did not come, differs from this node, or cannot train.
        """
        messages.wait_until(self._have_all_joined, self._timeout)
        missing = [node for node in self._silent_looks if node not in self._records]
        if missing:
            self.refuse(
                f"Node {', '.join(map(str, missing))} of {self._nodes.count} did not come to "
                f"{self._nodes.address}, port {self._nodes.port}, within {self._timeout:.0f} s; start "
                f"it there with NODE_RANK={missing[0]}, and see that the port is open between the hosts."
            )
        self._refuse_differences()
        other_records = [self._records[node] for node in self._silent_looks]
        hosts = (self._node_0_record.host, *(record.host for record in other_records))
        address, interface = _find_reached_interface(other_records)
        port = find_free_port()
        self._state = replace(self._state, torchrun_port=port)
        return replace(
            self._nodes, hosts=hosts, port=port, interface=interface, local_address=address
        )

    def _refuse_differences(self) -> None:
        """Stop all nodes with a LaunchError if a node has another value than node 0 of what must agree."""
        for node, record in self._records.items():
            for name, value in self._node_0_record.has.items():
                node_value = record.has.get(name)
                if node_value != value:
                    self.refuse(
                        f"{self._name_node(node)} has {name} {node_value}, and node 0 "
                        f"({self._node_0_record.host}) {value}; all nodes must have the same."
                    )

    def announce(self, folder: Path) -> None:
        """Publish the run folder, and let all nodes start once each of them sees it.

        Raises:
            LaunchError: A node does not see the folder.
        """
        digest = messages.hash_if_present(folder / RUN_FILE)
        self._state = replace(self._state, folder=relative_to_root(folder), sha256=digest)
        self._wait_for_all(
            lambda record: record.sees_folder or bool(record.problem), 2 * messages.ANSWER_SECONDS
        )
        for node, record in self._records.items():
            if not record.sees_folder:
                problem = record.problem or "it gave no answer"
                self.refuse(f"{self._name_node(node)} cannot start: {problem}.")
        self._files = NodeFiles(folder, tuple(self._records))
        self._state = replace(self._state, started=True)

    def refuse(self, reason: str) -> NoReturn:
        """Stop the other nodes before they have started, and wait until they know why.

        Raises:
            LaunchError: Always, with the reason.
        """
        self._state = replace(self._state, refused=reason)
        self._wait_for_all(lambda record: bool(record.problem), REFUSAL_SECONDS)
        raise LaunchError(reason)

    def find_failure(self) -> str | None:
        """Return a sentence on why another node failed; None if no node failed.

        Node 0 calls this method repeatedly while it trains, and each call appends new log lines of the other nodes to
        the run's log. If a failed node reports a cause, the first such cause is stored in `cause`, and its reason is
        returned from then on. Otherwise the sentence has the exit code of the failed node.
        """
        if self._files is not None:
            self._files.append_new_output()
        failed = [(node, record) for node, record in self._records.items() if record.exit_code]
        for node, record in failed:
            if self.cause is None and record.cause is not None:
                reason = f"{self._name_node(node)}: {record.cause.reason}"
                self.cause = replace(record.cause, reason=reason)
        if self.cause is not None:
            return self.cause.reason
        for node, record in failed:
            return f"{self._name_node(node)} ended with {record.exit_code}."
        return None

    def wait_for_stacks(self, stopped_ranks: Sequence[int]) -> Sequence[int]:
        """Tell the other nodes that the run hangs, and return the stopped ranks of all nodes.

        The other nodes collect their stacks, report their stopped ranks, and end.
        """
        self._state = replace(self._state, hangs=True)
        self._wait_for_all(lambda record: record.stopped_ranks is not None, STACK_SECONDS)
        all_stopped = list(stopped_ranks)
        for record in self._records.values():
            all_stopped += record.stopped_ranks or ()
        return sorted(all_stopped)

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        """Tell the other nodes that this one has ended, and wait for them; return the first exit code that is not 0."""
        self._state = replace(self._state, exit_code=exit_code)
        # A node counts as done only once it has ended.
        self._wait_for_all(lambda _: False, END_SECONDS)
        self.find_failure()
        if self._files is not None:
            self._files.append_remaining_output()
        for code in (exit_code, *(record.exit_code for record in self._records.values())):
            if code:
                return code
        return 0

    def _read_records(self, values: Sequence[bytes]) -> None:
        """Store the records that the other nodes have written, and mark nodes without a heartbeat as lost.

        A node that has ended, or was lost, keeps its last record.
        """
        for node, data in zip(tuple(self._silent_looks), values, strict=True):
            known, record = self._records.get(node), decode(data, NodeRecord)
            if known is not None and known.exit_code is not None:
                continue
            # The number of a heartbeat makes its record differ from the last one.
            if record is not None and record != known:
                self._silent_looks[node] = 0
                self._store_record(node, record)
            elif known is not None:
                self._silent_looks[node] += 1
                silent_seconds = self._silent_looks[node] * messages.BEAT_SECONDS
                if silent_seconds > messages.SILENT_SECONDS:
                    self._store_record(node, replace(known, exit_code=1, cause=_LOST))

    def _store_record(self, node: int, record: NodeRecord) -> None:
        """Store a node's record in a new dictionary, because another thread may iterate over the old one."""
        self._records = {**self._records, node: record}

    def _have_all_joined(self) -> bool:
        """Return True if every node has joined.

        Raises:
            LaunchError: A node cannot train or was lost, or another node 0 is at MASTER_ADDR=.
        """
        raise_if_stop_requested()
        self._refuse_if_taken()
        for node, record in self._records.items():
            if record.problem:
                self.refuse(f"{self._name_node(node)}: {record.problem}")
            if record.exit_code is not None:
                self.refuse(
                    f"{self._name_node(node)} was lost before the run began; start all again."
                )
        return len(self._records) == len(self._silent_looks)

    def _refuse_if_taken(self) -> None:
        """Stop all nodes with a LaunchError if MASTER_ADDR= is another machine, on which another node 0 answers."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + messages.LOOK_SECONDS
        node_0 = messages.find_node_0(self._nodes.address, self._nodes.port)
        # This machine may have MASTER_ADDR= as an address that only other machines see.
        if node_0 == self._node_0_record:
            self._next_look = math.inf
        elif node_0 is not None:
            self.refuse(
                f"NODE_RANK=0 is taken by host {node_0.host} at MASTER_ADDR={self._nodes.address}; give "
                "each host its own."
            )

    def _wait_for_all(self, condition: Callable[[NodeRecord], bool], seconds: float) -> None:
        """Wait until each other node fulfils a condition or has ended, at most `seconds`."""

        def is_done() -> bool:
            records = self._records.values()
            return all(record.exit_code is not None or condition(record) for record in records)

        messages.wait_until(is_done, seconds)

    def _name_node(self, node: int) -> str:
        """Return the name of a node with its host, such as `Node 1 (gpu-b)`."""
        return f"Node {node} ({self._records[node].host})"


def _find_reached_interface(records: Sequence[NodeRecord]) -> tuple[str | None, str | None]:
    """Return the address at which other nodes reach this machine, and the network interface that has it.

    Both are None if no interface has any of the addresses, as behind address translation.
    """
    for record in records:
        interface = messages.find_interface(record.reaches)
        if interface is not None:
            return record.reaches, interface
    return None, None
