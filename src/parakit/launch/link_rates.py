"""`python -m parakit.launch.link_rates`: what the devices here send each other, as JSON for `make doctor`.

An all-reduce between all visible GPUs with NCCL, or between two CPU ranks with gloo; with NNODES= and
its like one rank of each node. The rate of the link is given beside it: NVLink's, the network
card's, or for CPU ranks what a plain TCP connection over loopback moves. Meanwhile the clocks of the
GPUs are sampled, with the reasons for throttling.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import psutil

from parakit.cluster import Nodes, parse_nodes
from parakit.config import settings
from parakit.config.hardware import find_device, link_by_key
from parakit.config.run import DeviceKind
from parakit.config.setting import parse_settings
from parakit.launch import microbenchmark
from parakit.launch.background import BackgroundThread
from parakit.launch.devices import (
    DeviceSample,
    Gpu,
    clock_limit_mhz,
    find_links,
    sample_gpus,
    visible_gpus,
)
from parakit.launch.microbenchmark import Workload
from parakit.launch.rendezvous.messages import find_interface

CPU_RANKS = 2
LOOPBACK_BYTES = 256 << 20
CLOCK_INTERVAL_SECONDS = 0.2
WORKLOADS = {
    DeviceKind.CPU: Workload(all_reduce_bytes=16 << 20, node_pairs=True),
    # The product comes first, so that the clocks rise before anything is sent.
    DeviceKind.GPU: Workload(
        matmul_size=8192, all_reduce_bytes=256 << 20, node_pairs=True, seconds_each=2.0
    ),
}


def measure_link(nodes: Nodes | None = None) -> dict[str, Any] | None:
    """Measure between this machine's devices, or one device of each node; None on later nodes.

    Raises:
        LaunchError: The ranks failed; with their last error.
    """
    gpus = visible_gpus()
    device = DeviceKind.GPU if gpus else DeviceKind.CPU
    ranks = 1 if nodes else len(gpus) or CPU_RANKS
    interface = _interface(nodes) if nodes else None
    variables = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    with ClockWatch(gpus) as watch:
        figures = microbenchmark.run_workload(WORKLOADS[device], device, ranks, nodes, variables)
    if figures is None:
        return None
    link, rate = _link_between(interface) if nodes else identify_local_link(gpus[:ranks])
    return {
        "backend": "NCCL" if gpus else "gloo",
        "ranks": ranks * (nodes.count if nodes else 1),
        # That each rank sends in a ring; None for a rank alone.
        "bytes_per_second": figures.all_reduce_bytes_per_second,
        "link": link,
        # Of one direction; None where it is not known.
        "link_bytes_per_second": rate,
        "nodes": figures.nodes,
        # Of each node with the next, alone.
        "pairs": figures.pair_bytes_per_second,
        "clocks": watch.summarize(),
    }


def identify_local_link(gpus: Sequence[Gpu]) -> tuple[str, float | None]:
    """What connects the devices of this machine, and its rate."""
    if not gpus:
        return "TCP over loopback", measure_loopback_bytes_per_second()
    links = find_links(gpus)
    device = find_device(gpus[0].name)
    if links and all(link.nvlinks for link in links) and device is not None:
        known = link_by_key(device.link)
        return known.name, known.bytes_per_second
    return ("PCIe", None) if links else ("nothing: one GPU", None)


def measure_loopback_bytes_per_second() -> float:
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


class ClockWatch(BackgroundThread):
    """Samples GPUs while the `with` block runs: their highest clocks, reasons for throttling."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus
        self._readings: list[list[DeviceSample]] = [[] for _ in gpus]
        super().__init__()

    def summarize(self) -> list[dict[str, Any]]:
        """What was seen, by GPU; None is what NVML does not report."""
        return list(map(_clock, self._gpus, self._readings))

    def _watch(self) -> None:
        while True:
            for place, reading in sample_gpus(self._gpus):
                self._readings[place].append(reading)
            if self.done.wait(CLOCK_INTERVAL_SECONDS):
                return


def _clock(gpu: Gpu, readings: Sequence[DeviceSample]) -> dict[str, Any]:
    clocks = (each["sm_clock_mhz"] for each in readings if "sm_clock_mhz" in each)
    texts = (each.get("throttle_reasons", "none") for each in readings)
    reasons = dict.fromkeys(reason for text in texts for reason in text.split(" + "))
    reasons.pop("none", None)
    return {
        "gpu": gpu.index,
        "highest_mhz": max(clocks, default=None),
        "limit_mhz": clock_limit_mhz(gpu),
        "throttling": " + ".join(reasons) or "none",
    }


def _send(address: tuple[str, int]) -> None:
    block = bytes(1 << 20)
    with socket.create_connection(address) as connection:
        for _ in range(LOOPBACK_BYTES >> 20):
            connection.sendall(block)


def _link_between(interface: str | None) -> tuple[str, float | None]:
    """The card that leads to the first node, and the rate it was set to; Linux counts in Mbit/s."""
    if interface is None:
        return "the network", None
    speed = psutil.net_if_stats()[interface].speed
    return f"network card {interface}", speed * 1e6 / 8 if speed else None


def _interface(nodes: Nodes) -> str | None:
    """The network interface that leads to the first node."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(nodes.address), nodes.port))  # sends nothing
        return find_interface(probe.getsockname()[0])


if __name__ == "__main__":
    try:
        measured = measure_link(
            parse_nodes(Namespace(**parse_settings(settings.NODE_SETTINGS, os.environ)))
        )
    except ValueError as error:
        print(json.dumps({"problem": str(error)}))
        sys.exit(1)
    if measured is not None:
        print(json.dumps(measured))
