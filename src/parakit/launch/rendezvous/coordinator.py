"""Node 0's side: waits for all nodes, checks that they run the same, and notices when one is lost."""

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
"""For a node to collect its ranks' stacks."""

END_SECONDS = 40.0
"""For the others to end after this node has."""

REFUSAL_SECONDS = 5.0
"""For the others to read why there is no run."""

_LOST = StatusRecord(Status.CRASHED, None, "it was lost: its launcher gives no sign.")


class Coordinator(BackgroundThread, NodeGroup):
    """Serves the store while the `with` block runs."""

    stop_seconds = messages.ANSWER_SECONDS

    def __init__(
        self, nodes: Nodes, own: NodeRecord, timeout: float = messages.TIMEOUT_SECONDS
    ) -> None:
        """Listen at once: other nodes may come from now on.

        Raises:
            LaunchError: The port is taken, or torch is not installed.
        """
        self._nodes = nodes
        self._own = replace(own, beat=time.time_ns())  # No two are the same.
        self._timeout = timeout
        self._records: dict[int, NodeRecord] = {}
        self._silent_looks = dict.fromkeys(range(1, nodes.count), 0)
        """Looks since a node's last heartbeat; of a store that is slow to answer there are few."""
        self._files: NodeFiles | None = None
        self._state = RunState(nodes.count)
        try:
            self._store = messages.open_store("127.0.0.1", nodes.port, is_master=True)
        except RuntimeError as error:
            why = str(error).rpartition("message: ")[2].splitlines()[0]
            raise LaunchError(
                f"MASTER_PORT={nodes.port} cannot be listened on ({why}); end what uses it, or name "
                "another, the same on all hosts."
            ) from None
        self._store.set(node_key(0), encode(self._own))  # NODE_RANK=0 is taken.
        self._next_look = math.inf if messages.is_local_address(nodes.address) else 0.0
        for node in self._silent_looks:
            self._store.set(node_key(node), "")
        self._store.set(messages.RUN_KEY, encode(self._state))  # The others wait for this.
        super().__init__()

    def stop(self) -> None:
        """As `BackgroundThread.stop`; no node can connect any more."""
        super().stop()
        # It listens as long as it is referred to, such as by an error's traceback.
        del self._store

    def _watch(self) -> None:
        store, last = self._store, False
        while not last:
            last = self.done.wait(messages.BEAT_SECONDS)
            store.set(messages.RUN_KEY, encode(self._state))
            self._look(store.multi_get([node_key(node) for node in self._silent_looks]))

    def gather(self) -> Nodes:
        """Wait for all others; the nodes with what is known of them now.

        Raises:
            LaunchError: One did not come, has something else than this node, or cannot run its share.
        """
        messages.wait_until(self._have_all_come, self._timeout)
        if missing := [node for node in self._silent_looks if node not in self._records]:
            self.refuse(
                f"Node {', '.join(map(str, missing))} of {self._nodes.count} did not come to "
                f"{self._nodes.address}, port {self._nodes.port}, within {self._timeout:.0f} s; start "
                f"it there with NODE_RANK={missing[0]}, and see that the port is open between the hosts."
            )
        own, others = self._own, [self._records[node] for node in self._silent_looks]
        for node, other in self._records.items():
            for name, value in own.has.items():
                if (theirs := other.has.get(name)) != value:
                    self.refuse(
                        f"{self._name(node)} has {name} {theirs}, and node 0 ({own.host}) {value}; all "
                        "nodes must have the same."
                    )
        hosts = (own.host, *(other.host for other in others))
        reached = (other.reaches for other in others if messages.find_interface(other.reaches))
        address = next(reached, None)
        interface = messages.find_interface(address) if address else None
        port = find_free_port()
        self._state = replace(self._state, torchrun_port=port)
        joined = replace(self._nodes, hosts=hosts, port=port, interface=interface)
        return replace(joined, local_address=address)

    def announce(self, folder: Path) -> None:
        """Publish the run folder, and let all start once each has found it.

        Raises:
            LaunchError: One does not see it.
        """
        digest = messages.hash_if_present(folder / RUN_FILE)
        self._state = replace(self._state, folder=relative_to_root(folder), sha256=digest)
        self._wait_for_all(
            lambda one: one.sees_folder or bool(one.problem), 2 * messages.ANSWER_SECONDS
        )
        for node, record in self._records.items():
            if not record.sees_folder:
                problem = record.problem or "it gave no answer"
                self.refuse(f"{self._name(node)} cannot start: {problem}.")
        self._files = NodeFiles(folder, tuple(self._records))
        self._state = replace(self._state, started=True)

    def refuse(self, reason: str) -> NoReturn:
        """Stop the other nodes before they have started, and wait until they know why.

        Raises:
            LaunchError: Always, with the reason.
        """
        self._state = replace(self._state, refused=reason)
        self._wait_for_all(lambda one: bool(one.problem), REFUSAL_SECONDS)
        raise LaunchError(reason)

    def find_failure(self) -> str | None:
        """As `NodeGroup.find_failure`; also brings over what the others have logged."""
        if self._files is not None:
            self._files.append_new_output()
        failed = {self._name(n): one for n, one in self._records.items() if one.exit_code}
        for name, record in failed.items():
            if self.cause is None and record.cause is not None:
                self.cause = replace(record.cause, reason=f"{name}: {record.cause.reason}")
        if self.cause is not None:
            return self.cause.reason
        return next((f"{name} ended with {one.exit_code}." for name, one in failed.items()), None)

    def wait_for_stacks(self, stopped_ranks: Sequence[int]) -> Sequence[int]:
        """As `NodeGroup.wait_for_stacks`: asks the others, which then end."""
        self._state = replace(self._state, hangs=True)
        self._wait_for_all(lambda one: one.stopped_ranks is not None, STACK_SECONDS)
        theirs = (record.stopped_ranks or () for record in self._records.values())
        return sorted((*stopped_ranks, *(rank for ranks in theirs for rank in ranks)))

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        """As `NodeGroup.finish`; the first failure's exit code."""
        self._state = replace(self._state, exit_code=exit_code)
        self._wait_for_all(lambda _: False, END_SECONDS)
        self.find_failure()
        if self._files is not None:
            self._files.append_remaining_output()
        codes = (record.exit_code for record in self._records.values())
        return exit_code or next(filter(None, codes), 0)

    def _look(self, values: Sequence[bytes]) -> None:
        """Take what the others have written; one that has ended, or was lost, writes no more."""
        for node, data in zip(tuple(self._silent_looks), values, strict=True):
            known, record = self._records.get(node), decode(data, NodeRecord)
            if known is not None and known.exit_code is not None:
                continue
            if record is not None and record != known:
                self._silent_looks[node] = 0
                self._records = {**self._records, node: record}
            elif known is not None:
                self._silent_looks[node] += 1
                if self._silent_looks[node] * messages.BEAT_SECONDS > messages.SILENT_SECONDS:
                    lost = replace(known, exit_code=1, cause=_LOST)
                    self._records = {**self._records, node: lost}

    def _have_all_come(self) -> bool:
        raise_if_stop_requested()
        self._give_way()
        for node, record in self._records.items():
            if record.problem:
                self.refuse(f"{self._name(node)}: {record.problem}")
            if record.exit_code is not None:
                self.refuse(f"{self._name(node)} was lost before the run began; start all again.")
        return len(self._records) == len(self._silent_looks)

    def _give_way(self) -> None:
        """End where MASTER_ADDR= is not this machine and another node 0 answers there."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + messages.LOOK_SECONDS
        there = messages.find_node_0(self._nodes.address, self._nodes.port)
        if there == self._own:  # By an address that only others see.
            self._next_look = math.inf
        elif there is not None:
            self.refuse(
                f"NODE_RANK=0 is taken by host {there.host} at MASTER_ADDR={self._nodes.address}; give "
                "each host its own."
            )

    def _wait_for_all(self, condition: Callable[[NodeRecord], bool], seconds: float) -> None:
        """Wait until it holds of each, or that one has ended."""

        def holds() -> bool:
            records = self._records.values()
            return all(one.exit_code is not None or condition(one) for one in records)

        messages.wait_until(holds, seconds)

    def _name(self, node: int) -> str:
        return f"Node {node} ({self._records[node].host})"
