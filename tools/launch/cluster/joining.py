"""The side of every node but 0 of the meeting: reach node 0, be let in, hear of its end."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from tools.launch.cluster.lines import LineError, Lines
from tools.launch.cluster.meeting import ANSWER_SECONDS, PATIENCE_SECONDS, Present, interface_of
from tools.launch.cluster.node_files import node_folder
from tools.launch.cluster.nodes import Nodes
from tools.launch.errors import LaunchError
from tools.launch.supervise import exit_status
from tools.records.run import LOG_FILE, RUN_FILE, Status, StatusRecord
from tools.report.read.diagnosis import diagnose
from tools.spec.files import ROOT


class OtherNode:
    """A connection to node 0."""

    cause = None

    def __init__(self, nodes: Nodes, patience: float = PATIENCE_SECONDS) -> None:
        self._nodes = nodes
        self._lines = Lines(_connect(nodes, patience))
        self._failed: str | None = None
        self._hangs = False
        self._folder: Path | None = None
        self._kills_before = exit_status.memory_kills()

    def introduce(self, own: Present, problem: str | None = None) -> None:
        """Say who this is, and why it cannot run its share if it cannot."""
        self._lines.send(**asdict(own), problem=problem)

    def interface(self) -> str | None:
        """The network interface by which node 0 is reached."""
        return interface_of(self._lines)

    def join(self) -> Path:
        """Wait for the run folder and the word to start.

        Raises:
            LaunchError: Node 0 refuses, is gone, or its folder is not seen from here.
        """
        told = self._expect("run")
        folder = ROOT / str(told["run"])
        if not _appears(folder / RUN_FILE, str(told["sha256"])):
            problem = f"it does not see {folder}, which node 0 has made"
            self._lines.send(problem=f"{problem}; RUNS= must name a folder that all hosts share")
        else:
            self._lines.send(sees=True)
        self._expect("go")
        self._folder = node_folder(folder, self._nodes.rank)
        return folder

    def announce(self, folder: Path) -> None:
        """Node 0's to do."""

    def failure(self) -> str | None:
        """As `NodeGroup.failure`."""
        if self._failed is None:
            try:
                message = self._lines.receive(0)
            except LineError:
                message = None
            self._hangs = self._hangs or bool(message and message.get("hangs"))
            if message is not None and message.get("exit"):
                self._failed = "Node 0 has ended the run."
            elif message is None and self._lines.ended:
                self._failed = "Node 0 was lost."
        return self._failed

    def hangs(self, stands_still: bool) -> bool:  # noqa: ARG002 - a node may have nothing to log
        """As `NodeGroup.hangs`: whether node 0 says so."""
        return self._hangs

    def stopped(self, own: Sequence[int]) -> Sequence[int]:
        """As `NodeGroup.stopped`: tells node 0."""
        self._lines.send(stopped=list(own))
        return own

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:
        """As `NodeGroup.finish`; everything of this node is on the disk."""
        why = None if self._failed else self._untold(exit_code, error)
        self._lines.send(exit=exit_code, why=msgspec.to_builtins(why))
        self._lines.close()
        return exit_code

    def close(self) -> None:
        """Hang up."""
        self._lines.close()

    def _untold(self, exit_code: int, error: BaseException | None) -> StatusRecord | None:
        """How this node ended, where its log, which node 0 has too, does not say so."""
        if isinstance(error, Exception):
            reason = str(error) or type(error).__name__
            return StatusRecord(Status.CRASHED, None, reason, getattr(error, "rank", None))
        if error is not None:
            return StatusRecord(Status.INTERRUPTED, None, "its launcher was told to stop.")
        if exit_code == 0 or self._folder is None:
            return None
        told = diagnose(self._folder / LOG_FILE, exit_code, interrupted=False)
        known = exit_status.classify_exit(self._folder, exit_code, False, self._kills_before)
        return known if known != told else None

    def _expect(self, name: str) -> dict[str, object]:
        try:
            message = self._lines.receive(PATIENCE_SECONDS + 2 * ANSWER_SECONDS) or {}
        except LineError as error:
            message = {"refused": f"something else answers at {self._nodes.address}: {error}."}
        if name not in message:
            reason = message.get("refused", f"Node 0 at {self._nodes.address} is gone.")
            raise LaunchError(str(reason))
        return message


def _connect(nodes: Nodes, patience: float) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((nodes.address, nodes.port), timeout=ANSWER_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Node 0 was not reached at MASTER_ADDR={nodes.address}, port {nodes.port}, "
                    f"within {patience:.0f} s ({error.strerror or error}); start it with NODE_RANK=0, "
                    "and see that the address is right and the port open."
                ) from None
        time.sleep(0.2)


def _appears(file: Path, digest: str) -> bool:
    """Whether a file with these bytes is there; a network file system may show it late."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            if hashlib.sha256(file.read_bytes()).hexdigest() == digest:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
