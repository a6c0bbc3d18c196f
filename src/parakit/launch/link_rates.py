"""`python -m parakit.launch.link_rates`: measure the links between this machine's devices, for `make doctor`.

The result is JSON. It has the rate of an all-reduce between all visible GPUs with NCCL, or between two CPU ranks
with gloo. With NNODES= and the other node variables, one rank per node takes part. Beside it stands the link's own
rate: NVLink's, the network card's, or for CPU ranks the rate of a plain TCP connection over loopback. GPU clocks
are sampled during the measurement, with the reasons for throttling.
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
    # The matrix product runs first, so that the GPU's clocks have risen when the all-reduce is measured.
    DeviceKind.GPU: Workload(
        matmul_size=8192, all_reduce_bytes=256 << 20, node_pairs=True, seconds_each=2.0
    ),
}


def measure_link(nodes: Nodes | None = None) -> dict[str, Any] | None:
    """Measure and return the communication rates between this machine's devices, or between one device per node.

    Args:
        nodes: Nodes between which the rates are measured; None measures between the devices of this machine.

    Returns:
        None on every node but the first. On the first node, a JSON object with these keys:

        - `backend`: `NCCL` or `gloo`.
        - `ranks`: Number of ranks that communicated.
        - `bytes_per_second`: Bytes that each rank sends per second in a ring; None for a single rank.
        - `link`: Description of the link.
        - `link_bytes_per_second`: Rated bytes per second of the link in one direction; None if unknown.
        - `nodes`: The nodes, as the ranks report them.
        - `pairs`: Rate between each node and the next node, while the other nodes wait.
        - `clocks`: Summary of the clocks of the GPUs during the measurement.

    Raises:
        LaunchError: The ranks failed; the message has their last error.
    """
    gpus = visible_gpus()
    device = DeviceKind.GPU if gpus else DeviceKind.CPU
    local_ranks, num_nodes, interface = len(gpus) or CPU_RANKS, 1, None
    if nodes:
        local_ranks, num_nodes, interface = 1, nodes.count, _find_interface_to_node_0(nodes)
    variables = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    with ClockWatch(gpus) as watch:
        figures = microbenchmark.run_workload(
            WORKLOADS[device], device, local_ranks, nodes, variables
        )
    if figures is None:
        return None
    if nodes:
        link, link_rate = _describe_network_link(interface)
    else:
        link, link_rate = identify_local_link(gpus[:local_ranks])
    return {
        "backend": "NCCL" if gpus else "gloo",
        "ranks": local_ranks * num_nodes,
        "bytes_per_second": figures.all_reduce_bytes_per_second,
        "link": link,
        "link_bytes_per_second": link_rate,
        "nodes": figures.nodes,
        "pairs": figures.pair_bytes_per_second,
        "clocks": watch.summarize(),
    }


def identify_local_link(gpus: Sequence[Gpu]) -> tuple[str, float | None]:
    """Return the name of the link between this machine's GPUs or CPU ranks, and its bytes per second.

    The rate is None for PCIe and for a single GPU.
    """
    if not gpus:
        return "TCP over loopback", measure_loopback_bytes_per_second()
    links = find_links(gpus)
    if not links:
        return "nothing: one GPU", None
    device = find_device(gpus[0].name)
    if device is not None and all(link.nvlinks for link in links):
        nvlink = link_by_key(device.link)
        return nvlink.name, nvlink.bytes_per_second
    return "PCIe", None


def measure_loopback_bytes_per_second() -> float:
    """Return the rate at which one TCP connection moves bytes from this machine to itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send_bytes, args=(server.getsockname(),), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            buffer, num_bytes = bytearray(1 << 20), 0
            start = time.perf_counter()
            # The connection gives 0 bytes once the sender has closed it.
            while received := connection.recv_into(buffer):
                num_bytes += received
            seconds = time.perf_counter() - start
        sender.join()
    return num_bytes / seconds


class ClockWatch(BackgroundThread):
    """A thread that samples clocks and throttling reasons of GPUs during a `with` block."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus
        self._samples: list[list[DeviceSample]] = [[] for _ in gpus]
        super().__init__()

    def summarize(self) -> list[dict[str, Any]]:
        """Return per GPU its highest clock, its clock limit and its throttling reasons; None is unreported."""
        return list(map(_summarize_clocks, self._gpus, self._samples))

    def _watch(self) -> None:
        while True:
            for index, sample in sample_gpus(self._gpus):
                self._samples[index].append(sample)
            if self.done.wait(CLOCK_INTERVAL_SECONDS):
                return


def _summarize_clocks(gpu: Gpu, samples: Sequence[DeviceSample]) -> dict[str, Any]:
    """Return the highest clock, the clock limit and the throttling reasons of one GPU over its samples."""
    clocks_mhz = [sample["sm_clock_mhz"] for sample in samples if "sm_clock_mhz" in sample]
    # The keys are a set that keeps the order in which the reasons came.
    reasons: dict[str, None] = {}
    for sample in samples:
        for reason in sample.get("throttle_reasons", "none").split(" + "):
            reasons[reason] = None
    reasons.pop("none", None)
    return {
        "gpu": gpu.index,
        "highest_mhz": max(clocks_mhz, default=None),
        "limit_mhz": clock_limit_mhz(gpu),
        "throttling": " + ".join(reasons) or "none",
    }


def _send_bytes(address: tuple[str, int]) -> None:
    """Send LOOPBACK_BYTES to a TCP address in blocks of 1 MiB."""
    block = bytes(1 << 20)
    with socket.create_connection(address) as connection:
        for _ in range(LOOPBACK_BYTES >> 20):
            connection.sendall(block)


def _describe_network_link(interface: str | None) -> tuple[str, float | None]:
    """Return the name of the network card and its bytes per second.

    Without an interface the link is called `the network`. The rate is None if the card does not report it.
    """
    if interface is None:
        return "the network", None
    megabits_per_second = psutil.net_if_stats()[interface].speed
    # Linux reports 0 for an unknown speed.
    bytes_per_second = megabits_per_second * 1e6 / 8 if megabits_per_second else None
    return f"network card {interface}", bytes_per_second


def _find_interface_to_node_0(nodes: Nodes) -> str | None:
    """Return the network interface that leads to the first node; None if no interface has the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing. It makes the kernel choose a route.
        probe.connect((socket.gethostbyname(nodes.address), nodes.port))
        return find_interface(probe.getsockname()[0])


if __name__ == "__main__":
    try:
        node_variables = Namespace(**parse_settings(settings.NODE_SETTINGS, os.environ))
        measured = measure_link(parse_nodes(node_variables))
    except ValueError as error:
        print(json.dumps({"problem": str(error)}))
        sys.exit(1)
    if measured is not None:
        print(json.dumps(measured))
