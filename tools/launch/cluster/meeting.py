"""How the launchers of a run's nodes meet before torchrun does, and hear of each other's end.

Node 0 listens where torchrun will, sees that all have the same kit, Megatron, flags and data, makes the
run folder, and lets them start once each has found it: the folder must lie on a file system that all
share. The connections stay open, so that a node that fails or vanishes ends the run on all others at
once; torchrun itself would wait for minutes.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from tools.launch.cluster.lines import LineError, Lines
from tools.launch.cluster.node_files import NodeFiles
from tools.launch.cluster.nodes import Nodes
from tools.launch.errors import LaunchError
from tools.records.run import RUN_FILE, Status, StatusRecord
from tools.spec.files import ROOT

PATIENCE_SECONDS = 300.0
"""For the others to be started, one host after another, by hand."""

ANSWER_SECONDS = 30.0
"""For a node to answer; also for a network file system to show what another node wrote."""

STACK_SECONDS = 10.0
"""For a node to collect its ranks' stacks."""

END_SECONDS = 40.0
"""For the others to end after this node has."""


@dataclass(frozen=True)
class Present:
    """What a node says of itself."""

    node: int
    host: str
    has: Mapping[str, str]
    """What all nodes must have alike, by name."""


class Closable(Protocol):
    """Either side."""

    def close(self) -> None:
        """Hang up."""
        ...


class FirstNode:
    """Node 0's side."""

    def __init__(self, nodes: Nodes, patience: float = PATIENCE_SECONDS) -> None:
        self._nodes = nodes
        self._patience = patience
        self._others: dict[int, Lines] = {}
        self._hosts: dict[int, str] = {}
        self._exits: dict[int, int] = {}
        self._files: NodeFiles | None = None
        self._listener = _listen(nodes.port)
        self.cause: StatusRecord | None = None

    def gather(self, own: Present) -> tuple[Present, ...]:
        """Wait for all others; everybody in node order.

        Raises:
            LaunchError: One did not come, has something else than this node, or cannot run its share.
        """
        found = {0: own}
        deadline = time.monotonic() + self._patience
        while len(found) < self._nodes.count:
            lines = self._accept(deadline, found)
            other = self._greet(lines, found)
            if other is not None:
                found[other.node] = other
        self._listener.close()
        present = tuple(found[node] for node in sorted(found))
        for other in present:
            if difference := _difference(own, other):
                self._refuse(difference)
        return present

    def interface(self) -> str | None:
        """The network interface by which the others reach this node."""
        return interface_of(next(iter(self._others.values())))

    def announce(self, folder: Path) -> None:
        """Tell the others the run folder, and let all start once each has found it.

        Raises:
            LaunchError: One does not see it.
        """
        digest = hashlib.sha256((folder / RUN_FILE).read_bytes()).hexdigest()
        for lines in self._others.values():
            lines.send(run=_named(folder), sha256=digest)
        for node, lines in self._others.items():
            answer = lines.receive(2 * ANSWER_SECONDS) or {"problem": "it gave no answer"}
            if "problem" in answer:
                self._refuse(f"{self._name(node)} cannot start: {answer['problem']}.")
        self._files = NodeFiles(folder, tuple(self._others))
        for lines in self._others.values():
            lines.send(go=True)

    def refuse(self, reason: str) -> None:
        """Send the others home."""
        for lines in self._others.values():
            lines.send(refused=reason)

    def failure(self) -> str | None:
        """As `NodeGroup.failure`; also brings over what the others have logged."""
        if self._files is not None:
            self._files.bring()
        for node, lines in self._others.items():
            self._listen_to(node, lines, 0)
            if self._exits.get(node, 0):
                ended = f"{self._name(node)} ended with {self._exits[node]}."
                return self.cause.reason if self.cause else ended
        return None

    def hangs(self, stands_still: bool) -> bool:
        """As `NodeGroup.hangs`: this node's log has the lines of all."""
        return stands_still

    def stopped(self, own: Sequence[int]) -> Sequence[int]:
        """As `NodeGroup.stopped`: asks the others, which then end."""
        for lines in self._others.values():
            lines.send(hangs=True)
        found = list(own)
        deadline = time.monotonic() + STACK_SECONDS
        for node, lines in self._others.items():
            answer = self._listen_to(node, lines, max(0.0, deadline - time.monotonic()))
            found += answer.get("stopped", ())
        return sorted(found)

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        """As `NodeGroup.finish`; the first failure's exit code."""
        for lines in self._others.values():
            lines.send(exit=exit_code)
        deadline = time.monotonic() + END_SECONDS
        for node, lines in self._others.items():
            while node not in self._exits and (left := deadline - time.monotonic()) > 0:
                self._listen_to(node, lines, left)
            lines.close()
        if self._files is not None:
            self._files.complete()
        return exit_code or next((code for code in self._exits.values() if code), 0)

    def close(self) -> None:
        """Hang up on everybody."""
        for lines in self._others.values():
            lines.close()
        self._listener.close()

    def _accept(self, deadline: float, found: Mapping[int, Present]) -> Lines:
        self._listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            return Lines(self._listener.accept()[0])
        except TimeoutError:
            missing = sorted(set(range(self._nodes.count)) - set(found))
            names = ", ".join(map(str, missing))
            self._refuse(
                f"Node {names} of {self._nodes.count} did not come to {self._nodes.address}, port "
                f"{self._nodes.port}, within {self._patience:.0f} s; start it there with "
                f"NODE_RANK={missing[0]}, and see that the port is open between the hosts."
            )
            raise AssertionError from None

    def _greet(self, lines: Lines, found: Mapping[int, Present]) -> Present | None:
        """Who came; None for somebody who is no node of this run."""
        try:
            message = lines.receive(ANSWER_SECONDS) or {}
            other = Present(int(message["node"]), str(message["host"]), dict(message["has"]))
        except (LineError, KeyError, TypeError, ValueError):
            lines.close()
            return None
        if other.node in found or other.node not in range(self._nodes.count):
            lines.send(
                refused=f"NODE_RANK={other.node} is taken by host {found[other.node].host}; "
                "give each host its own."
                if other.node in found
                else f"NODE_RANK={other.node} is not below NNODES={self._nodes.count}."
            )
            lines.close()
            return None
        self._others[other.node] = lines
        self._hosts[other.node] = other.host
        if message.get("problem"):
            self._refuse(f"{self._name(other.node)}: {message['problem']}")
        return other

    def _listen_to(self, node: int, lines: Lines, seconds: float) -> Mapping[str, Any]:
        """A node's next message, empty if there is none; its end is noted."""
        if node in self._exits:
            return {}
        try:
            message = lines.receive(seconds)
        except LineError:
            message = None
        if message is not None and isinstance(message.get("exit"), int):
            self._exits[node] = message["exit"]
            if message.get("why"):
                why = msgspec.convert(message["why"], StatusRecord)
                self.cause = self.cause or replace(why, reason=f"{self._name(node)}: {why.reason}")
        elif lines.ended:
            self._exits[node] = 1
            reason = f"{self._name(node)} was lost: its launcher is gone."
            self.cause = self.cause or StatusRecord(Status.CRASHED, None, reason)
        return message or {}

    def _name(self, node: int) -> str:
        return f"Node {node} ({self._hosts[node]})"

    def _refuse(self, reason: str) -> None:
        self.refuse(reason)
        raise LaunchError(reason)


@contextmanager
def closing(node: Closable) -> Iterator[None]:
    """Hang up on the way out, however it is taken."""
    try:
        yield
    finally:
        node.close()


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise LaunchError(
            f"MASTER_PORT={port} cannot be listened on ({error.strerror}); end what uses it, or name "
            "another, the same on all hosts."
        ) from None


def _difference(own: Present, other: Present) -> str | None:
    for name, value in own.has.items():
        theirs = other.has.get(name)
        if theirs != value:
            return (
                f"Node {other.node} ({other.host}) has {name} {theirs}, and node 0 ({own.host}) "
                f"{value}; all nodes must have the same."
            )
    return None


def interface_of(lines: Lines) -> str | None:
    """The network interface that a connection uses."""
    address = lines.socket.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def _named(folder: Path) -> str:
    resolved = folder.resolve()
    return str(resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else resolved)
