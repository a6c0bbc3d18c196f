"""`python -m tools.launch.probe.exchange`: an all-reduce between the devices here, as JSON.

Between all visible GPUs with NCCL, or between two CPU ranks with gloo; with NNODES= and its like also
between nodes, a rank each. Beside the rate stands that of the link: NVLink's, the network card's, or for
ranks of one machine what a plain TCP connection over loopback moves.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tools.launch.cluster.nodes import Nodes, nodes_from_environment
from tools.launch.compose import torchrun
from tools.launch.devices import Gpu, find_links, visible_gpus
from tools.launch.errors import LaunchError
from tools.launch.probe.clocks import Clock, ClockWatch
from tools.spec.files import ROOT
from tools.spec.hardware import find_device, link_by_key

SECONDS = 120
CPU_RANKS = 2
LOOPBACK_BYTES = 256 << 20


@dataclass(frozen=True)
class Exchange:
    """What was measured between the devices."""

    backend: str
    ranks: int
    bytes_per_second: float
    """That each rank sends in a ring all-reduce."""
    link: str
    """What joins them."""
    link_bytes_per_second: float | None
    """Of one direction; None where nobody tells."""
    nodes: tuple[str, ...] = ()
    pairs: tuple[float, ...] = ()
    """Each node with the next, alone."""
    clocks: tuple[Clock, ...] = ()


def measure(nodes: Nodes | None = None) -> Exchange:
    """Measure between this machine's devices, or one device of each node.

    Raises:
        LaunchError: The ranks failed; with the last line of what they said.
    """
    gpus = visible_gpus()
    device = "cuda" if gpus else "cpu"
    ranks = 1 if nodes else len(gpus) or CPU_RANKS
    with ClockWatch(gpus) as watch:
        figures = _figures(device, ranks, nodes)
    link, rate = _between_nodes(nodes) if nodes else link_here(gpus[:ranks])
    return Exchange(
        backend="NCCL" if gpus else "gloo",
        ranks=ranks * (nodes.count if nodes else 1),
        bytes_per_second=figures["all"],
        link=link,
        link_bytes_per_second=rate,
        nodes=tuple(figures["nodes"]),
        pairs=tuple(figures["pairs"]),
        clocks=tuple(watch.clocks()),
    )


def link_here(gpus: Sequence[Gpu]) -> tuple[str, float | None]:
    """What joins the devices of this machine, and its rate."""
    if not gpus:
        return "TCP over loopback", loopback_bytes_per_second()
    joined = find_links(gpus)
    device = find_device(gpus[0].name)
    if joined and all(link.nvlinks for link in joined) and device is not None:
        known = link_by_key(device.link)
        return known.name, known.bytes_per_second
    return ("PCIe", None) if joined else ("nothing: one GPU", None)


def loopback_bytes_per_second() -> float:
    """What one TCP connection to this machine itself moves."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(),), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            buffer, count, began = bytearray(1 << 20), 0, time.perf_counter()
            while received := connection.recv_into(buffer):
                count += received
            seconds = time.perf_counter() - began
        sender.join()
    return count / seconds


def _send(address: tuple[str, int]) -> None:
    block = bytes(1 << 20)
    with socket.create_connection(address) as connection:
        for _ in range(LOOPBACK_BYTES >> 20):
            connection.sendall(block)


def _between_nodes(nodes: Nodes) -> tuple[str, float | None]:
    """The card that leads to the first node, and the rate it was set to; Linux counts in Mbit/s."""
    name = _interface(nodes)
    if name is None:
        return "the network", None
    speed = psutil.net_if_stats()[name].speed
    return f"network card {name}", speed * 1e6 / 8 if speed else None


def _interface(nodes: Nodes) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(nodes.address), nodes.port))  # sends nothing
        address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def _figures(device: str, ranks: int, nodes: Nodes | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = (
            *torchrun(ranks, sys.executable, nodes),
            *("-m", "tools.launch.probe.exchange_rank", device, str(output)),
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if nodes and (interface := _interface(nodes)):
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(f"the ranks did not end within {SECONDS} s") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "Error" in line]
            raise LaunchError((lines or ["the ranks failed"])[-1].strip()[:200])
        if not output.is_file():  # Only rank 0's node has the figures.
            return {"all": 0.0, "nodes": [], "pairs": []}
        figures: dict[str, Any] = json.loads(output.read_text())
        return figures


if __name__ == "__main__":
    try:
        here = nodes_from_environment()
        measured = measure(here)
        if here is None or here.rank == 0:
            print(json.dumps(asdict(measured)))
    except LaunchError as error:
        print(json.dumps({"problem": str(error)}))
        sys.exit(1)
