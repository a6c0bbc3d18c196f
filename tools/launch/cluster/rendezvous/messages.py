"""What the launchers of a run's nodes write into the store that they share, and how they reach it.

Node 0 keeps two `TCPStore`s. The one on MASTER_PORT holds the port of the other and is closed before
torchrun, which needs MASTER_PORT, starts. In the other each node keeps one record of its own, which it
replaces, and a count that it raises as its heartbeat.

Other programs' bytes do no harm: the store drops what is not of its protocol. It has no
authentication, as torchrun's own has none: whoever can reach the ports can end a run. torch asks the
resolver for the name of each host that connects, and serves no host meanwhile: nothing here takes a slow
answer of the store for a lost node.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from tools.launch.errors import LaunchError
from tools.records.run import StatusRecord

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

TIMEOUT_SECONDS = 300.0
"""For the others to be started, one host after another, by hand."""

ANSWER_SECONDS = 30.0
"""For a node to answer; also for a network file system to show what another node wrote."""

BEAT_SECONDS = 0.1
"""Between two heartbeats of a worker."""

SILENT_SECONDS = 20.0
"""Without a heartbeat, or without a sign of the machine where the store is: the node is lost."""

PORT_KEY, COORDINATOR_KEY = "kit/port", "kit/node/0/record"
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def worker_key(node: int) -> str:
    """Of a worker's record."""
    return f"kit/node/{node}/worker"


def beat_key(node: int) -> str:
    """Of a worker's heartbeat, a number that grows."""
    return f"kit/node/{node}/beat"


@dataclass(frozen=True)
class NodeInfo:
    """A node, and what must be the same on all."""

    node: int
    host: str
    has: Mapping[str, str]
    """By name."""


@dataclass(frozen=True)
class WorkerRecord:
    """What a worker reports."""

    info: NodeInfo
    connection: str = ""
    """Its end of the connection to the store, `address:port`."""
    problem: str | None = None
    """Why it cannot run its share."""
    sees_folder: bool = False
    stopped_ranks: tuple[int, ...] | None = None
    """Those that a signal had stopped; their stacks are collected."""
    exit_code: int | None = None
    cause: StatusRecord | None = None
    """How it ended, where no log says so."""


@dataclass(frozen=True)
class CoordinatorRecord:
    """What node 0 reports."""

    nodes: int
    refused: str | None = None
    """Why there is no run."""
    folder: str | None = None
    """Of the run, from the repository root or absolute."""
    sha256: str = ""
    """Of its `run.json`."""
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


def serve_store(port: int = 0) -> TCPStore:
    """A store that listens on all interfaces; on any free port if none is given.

    Raises:
        LaunchError: The port is taken, or torch is not installed.
    """
    try:
        return _tcp_store("127.0.0.1", port, is_master=True)
    except RuntimeError as error:
        raise LaunchError(
            f"MASTER_PORT={port} cannot be listened on ({_in_short(error)}); end what uses it, or name "
            "another, the same on all hosts."
        ) from None


def reach_store(address: str, port: int) -> TCPStore:
    """A store that listens elsewhere. Waits without end for what accepts a connection and is silent.

    Raises:
        RuntimeError: Nothing listens there, or something else does.
    """
    return _tcp_store(address, port, is_master=False)


def load_torch() -> None:
    """Import torch, without its lines on connections that end or speak another protocol.

    Raises:
        LaunchError: It is not installed.
    """
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = before or "FATAL"
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        raise LaunchError(
            "Several nodes find each other through torch, which is not installed here; run 'make setup'."
        ) from None
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def served_connections(port: int) -> dict[str, str]:
    """Of a store of this process: this end's address by the other end, `address:port`."""
    return {
        f"{_plain(each.raddr.ip)}:{each.raddr.port}": _plain(each.laddr.ip)
        for each in _connections()
        if each.laddr.port == port
    }


def watch_connections(port: int) -> set[str]:
    """This process's ends of its connections to a store, `address:port`.

    torch waits for an answer without end: the kernel will end a connection whose other machine is lost.
    """
    found = set()
    for end, connection in _used_connections(port):
        milliseconds = round(1000 * SILENT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        found.add(end)
    return found


def break_connections(port: int) -> None:
    """End this process's connections to a store, which ends what waits for an answer of it."""
    for _, connection in _used_connections(port):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def interface_of(address: str | None) -> str | None:
    """The network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait; whether it held in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _tcp_store(address: str, port: int, is_master: bool) -> TCPStore:
    load_torch()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        address,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=ANSWER_SECONDS),
        wait_for_workers=False,
    )


def _used_connections(port: int) -> Iterator[tuple[str, socket.socket]]:
    """Each with a socket of its own for the same connection, open until the next."""
    for each in _connections():
        if each.raddr.port == port:
            with socket.socket(fileno=os.dup(each.fd)) as same:
                yield f"{_plain(each.laddr.ip)}:{each.laddr.port}", same


def _connections() -> list[Any]:
    every = psutil.Process().net_connections(kind="tcp")
    return [each for each in every if each.status == psutil.CONN_ESTABLISHED]


def _plain(address: str) -> str:
    """An IPv4 address as such where a socket for both kinds has it."""
    return address.removeprefix("::ffff:")


def _in_short(error: RuntimeError) -> str:
    """torch's message without what it found in each call."""
    return str(error).rpartition("message: ")[2].splitlines()[0]
