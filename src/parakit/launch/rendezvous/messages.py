"""What the launchers of a run's nodes write into the store that they share, and how they reach it.

Node 0 serves a `TCPStore` on MASTER_PORT to the end of the run; torchrun gets a free port. Each node
keeps one record in it and writes it again several times a second with another number: its heartbeat.

Other programs' bytes do no harm: the store drops what is not of its protocol. It has no
authentication, as torchrun's own has none: whoever can reach the port can end a run. torch asks the
resolver for the name of each host that connects, and serves no host meanwhile: nothing here takes a slow
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
"""For the others to be started, one host after another, by hand."""

ANSWER_SECONDS = 30.0
"""For a node to answer; also for a network file system to show what another node wrote."""

BEAT_SECONDS = 0.2
"""Between two heartbeats of a worker, and between two looks of node 0 at them."""

SILENT_SECONDS = 10.0
"""Without a heartbeat: the node is lost."""

HERE_SECONDS = 60.0
"""For node 0 to be started on the machine that a worker itself is on."""

LOOK_SECONDS = 1.0
"""Between two looks of a node 0 that is not at MASTER_ADDR= whether another is."""

RUN_KEY = "kit/run"
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def node_key(node: int) -> str:
    """Of a node's record."""
    return f"kit/node/{node}"


@dataclass(frozen=True)
class NodeRecord:
    """A node: what it has, and what it reports."""

    host: str
    has: Mapping[str, str]
    """What must be the same on all, by name."""
    reaches: str = ""
    """Node 0's address, as it is reached from there."""
    beat: int = 0
    """Another one in each heartbeat."""
    problem: str | None = None
    """Why it cannot run its share."""
    sees_folder: bool = False
    stopped_ranks: tuple[int, ...] | None = None
    """Those that a signal had stopped; their stacks are collected."""
    exit_code: int | None = None
    """Not 0 also of a node that was lost."""
    cause: StatusRecord | None = None
    """How it ended, where no log says so."""


@dataclass(frozen=True)
class RunState:
    """What node 0 reports to all."""

    nodes: int
    refused: str | None = None
    """Why there is no run."""
    folder: str | None = None
    """Of the run, from the repository root or absolute."""
    sha256: str = ""
    """Of its `run.json`."""
    torchrun_port: int = 0
    started: bool = False
    hangs: bool = False
    exit_code: int | None = None


def decode[Record](data: bytes, kind: type[Record]) -> Record | None:
    """A record; None for what is none, which another program may have written."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def encode(record: object) -> str:
    """A record as the store holds it."""
    return msgspec.json.encode(record).decode()


def open_store(address: str, port: int, is_master: bool = False) -> TCPStore:
    """The store at an address, or one that listens on all interfaces of this machine.

    Raises:
        LaunchError: torch is not installed.
        RuntimeError: Nothing listens there, or something else does; the port is taken.
    """
    load_torch()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=ANSWER_SECONDS)
    return TCPStore(address, port, is_master=is_master, timeout=timeout, wait_for_workers=False)


def is_local_address(address: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        with socket.create_server((address, 0)):
            return True
    except OSError:
        return False


def find_node_0(address: str, port: int) -> NodeRecord | None:
    """What calls itself node 0 there; None where nothing answers."""
    try:
        socket.create_connection((address, port), timeout=LOOK_SECONDS).close()
        return decode(open_store(address, port).get(node_key(0)), NodeRecord)
    except (OSError, RuntimeError):
        return None


def load_torch() -> None:
    """Import torch, without its lines on connections that end or speak another protocol.

    Raises:
        LaunchError: It is not installed.
    """
    is_quiet = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "FATAL")
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        raise LaunchError(
            "Several nodes find each other through torch, which is not installed here; run 'make setup'."
        ) from None
    finally:
        if not is_quiet:
            del os.environ[_LOG_LEVEL]


def find_interface(address: str) -> str | None:
    """The network interface that has an address."""
    interfaces = psutil.net_if_addrs().items()
    found = (name for name, has in interfaces if address in {one.address for one in has})
    return next(found, None)


def hash_if_present(file: Path) -> str:
    """sha256 of a file, or nothing while it is not there."""
    try:
        return compute_sha256(file)
    except OSError:
        return ""


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait; whether it held in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
