"""Define what the launchers of a run's nodes write into their shared store, and how they reach it.

Node 0 serves a `TCPStore` on MASTER_PORT until the run ends; torchrun gets a free port. Each node has one
record in the store. As its heartbeat, it writes the record several times per second with another number.

Bytes of other programs do no harm, because the store drops what is not in its protocol. The store has no
authentication, and torchrun's own has none either: whoever can reach the port can end a run. torch asks the
resolver for the name of each host that connects, and serves no host meanwhile. So nothing here takes a slow
answer of the store for a lost node.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from parakit.artifacts.io import compute_sha256
from parakit.artifacts.run import StatusRecord
from parakit.config.errors import LaunchError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

TIMEOUT_SECONDS = 300.0
"""Longest wait for the other nodes, which a user may start by hand, one host after another."""

ANSWER_SECONDS = 30.0
"""Longest wait for a node's answer, and for a network file system to show what another node wrote."""

BEAT_SECONDS = 0.2
"""Time between two heartbeats of a worker, and between two of node 0's checks of them."""

SILENT_SECONDS = 10.0
"""Time without a heartbeat after which a node counts as lost."""

HERE_SECONDS = 60.0
"""Longest wait for node 0 if MASTER_ADDR= is the worker's own machine."""

LOOK_SECONDS = 1.0
"""Time between two checks by which a node 0 that is not at MASTER_ADDR= looks for another node 0 there."""

RUN_KEY = "kit/run"
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def node_key(node: int) -> str:
    """Return the key of a node's record in the store."""
    return f"kit/node/{node}"


@dataclass(frozen=True)
class NodeRecord:
    """One node: the properties that all nodes must share, and its state."""

    host: str
    has: Mapping[str, str]
    """Values that must be the same on all nodes, by name."""
    reaches: str = ""
    """Address of node 0 as this node reaches it."""
    beat: int = 0
    """A number that changes with each heartbeat."""
    problem: str | None = None
    """Why this node cannot train; None if it can."""
    sees_folder: bool = False
    """Whether the node sees the run folder that node 0 made."""
    stopped_ranks: tuple[int, ...] | None = None
    """Ranks of this node that a signal had stopped, once all stacks are collected; None before."""
    exit_code: int | None = None
    """Exit code of the node; None while it runs. A lost node has a code other than 0."""
    cause: StatusRecord | None = None
    """How the node ended, if no log says it."""


@dataclass(frozen=True)
class RunState:
    """The state of the run, which node 0 reports to all nodes."""

    nodes: int
    refused: str | None = None
    """Why there is no run; None if there is one."""
    folder: str | None = None
    """The run folder, relative to the repository root or absolute; None before it is made."""
    sha256: str = ""
    """Hash of the run's `run.json`, by which a node recognizes the folder."""
    torchrun_port: int = 0
    started: bool = False
    hangs: bool = False
    exit_code: int | None = None


def decode[Record](data: bytes, kind: type[Record]) -> Record | None:
    """Return the record in some bytes; None if another program wrote them."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def encode(record: object) -> str:
    """Return a record as the store holds it."""
    return msgspec.json.encode(record).decode()


def open_store(address: str, port: int, is_master: bool = False) -> TCPStore:
    """Connect to the store at an address, or with `is_master` serve one on all interfaces of this machine.

    Raises:
        LaunchError: torch is not installed.
        RuntimeError: Nothing, or another program, listens at the address; or the port is taken.
    """
    load_torch()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=ANSWER_SECONDS)
    return TCPStore(address, port, is_master=is_master, timeout=timeout, wait_for_workers=False)


def is_local_address(address: str) -> bool:
    """Return True if an address belongs to this machine."""
    try:
        with socket.create_server((address, 0)):
            return True
    except OSError:
        return False


def find_node_0(address: str, port: int) -> NodeRecord | None:
    """Return the record of the node 0 that serves a store at an address; None if none answers."""
    try:
        socket.create_connection((address, port), timeout=LOOK_SECONDS).close()
        return decode(open_store(address, port).get(node_key(0)), NodeRecord)
    except (OSError, RuntimeError):
        return None


def load_torch() -> None:
    """Import torch with its log lines on broken connections and foreign protocols switched off.

    Raises:
        LaunchError: torch is not installed.
    """
    is_quiet = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "FATAL")
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        raise LaunchError(
            "Nodes find each other through torch, which is not installed here; run 'make setup'."
        ) from None
    finally:
        if not is_quiet:
            del os.environ[_LOG_LEVEL]


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if no interface has it."""
    for name, entries in psutil.net_if_addrs().items():
        if address in {entry.address for entry in entries}:
            return name
    return None


def hash_if_present(file: Path) -> str:
    """Return the sha256 of a file; empty while the file is missing."""
    try:
        return compute_sha256(file)
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; return False if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
