"""Train across two network namespaces that a shaped link connects: `NET=1gbps make train-…`.

usage: python -m parakit.launch.network 1gbps 2 -- -m megatron_patches ENTRY FLAGS…

Each namespace is a node of the run with half of the CPU ranks. A veth pair connects the halves, and a token bucket
(tc tbf) at each end limits the rate. Namespaces and link are removed when the run ends, even if it fails.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from parakit.cluster import Nodes
from parakit.config.run import DeviceKind
from parakit.config.variables import INTERFACES
from parakit.launch.supervise.interruption import end_processes

NODES = 2
FASTEST_BITS_PER_SECOND = 10e9
"""Fastest rate of a shaped link. Two processes reach 12 to 14 Gbit/s over gloo here, so that a faster limit
would limit nothing.
"""

_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[mg])bps", re.IGNORECASE)
_UNIT_BITS = {"m": 10**6, "g": 10**9}
_CONGESTION_CONTROL = "reno"
"""TCP congestion control in the namespaces. `reno` fills a link that loses nothing, and every namespace may
choose it. The machine's default may be one that paces and probes, such as bbr. That slows the first
megabytes after a pause, and stops every ten seconds.
"""
_SETTING = "/proc/sys/net/ipv4/tcp_congestion_control"
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 3.0
"""Time from SIGTERM to SIGKILL. It is shorter than the launcher's, so that the namespaces are removed before
the launcher kills this process.
"""


def format_rate(bits_per_second: int) -> str:
    """Return the rate as the user writes it, such as `2.5gbps`."""
    unit = "g" if bits_per_second >= _UNIT_BITS["g"] else "m"
    return f"{bits_per_second / _UNIT_BITS[unit]:g}{unit}bps"


def parse_rate(text: str) -> int:
    """Return the bits per second in each direction of `1gbps`, `2.5gbps` or `200mbps`.

    Raises:
        ValueError: The text has another form, or the rate is 0.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match["number"]) == 0:
        raise ValueError(f"{text} is not a rate such as 1gbps or 200mbps")
    return round(float(match["number"]) * _UNIT_BITS[match["unit"].lower()])


def network_problems(bits_per_second: int, ranks: int, device: DeviceKind) -> Iterator[str]:
    """Yield a sentence per reason why this machine cannot limit the link between a run's ranks."""
    variable = f"NET={format_rate(bits_per_second)}"
    if device is not DeviceKind.CPU:
        yield f"{variable} shapes traffic between CPU ranks; name a target that ends in cpu."
    if ranks % NODES:
        yield f"{variable} puts half of the ranks on each side of a link, and {ranks} is odd."
    if bits_per_second > FASTEST_BITS_PER_SECOND:
        yield (
            f"{variable} is more than CPU ranks reach unshaped (12 to 14 Gbit/s), so it would measure "
            "gloo; use 10gbps or less, and 'make plan' for faster links."
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        yield f"NET= needs {' and '.join(missing)}; install the package iproute2, or leave NET= out."
    if os.geteuid() != 0:
        yield "NET= needs root to make network namespaces; run as root, or leave NET= out."


def shaped_link_command(
    bits: int, ranks: int, python: str, program: Sequence[str]
) -> tuple[str, ...]:
    """Return the command that runs a program's ranks on both sides of a link of `bits` bits per second."""
    return (python, "-m", "parakit.launch.network", format_rate(bits), str(ranks), "--", *program)


@dataclass(frozen=True)
class LinkSide:
    """One end of the shaped link, which is a node of its own."""

    rank: int
    name: str
    """Name of the namespace, and of the network device in it."""
    address: str


@contextmanager
def open_shaped_link(bits_per_second: int, name: str) -> Iterator[tuple[LinkSide, ...]]:
    """Connect two network namespaces, whose names begin with `name`, during the `with` block."""
    # The bucket holds what the link sends in a millisecond. It must hold more than a segment of 64 KiB,
    # because veth does not divide segments.
    burst = max(bits_per_second // 8 // 1000, 128 << 10)
    limit = ("rate", f"{bits_per_second}bit", "burst", str(burst), "latency", "50ms")
    _remove_stale_namespaces()
    sides = tuple(
        LinkSide(rank, f"{name}{letter}", f"10.77.0.{rank + 1}") for rank, letter in enumerate("ab")
    )
    try:
        for side in sides:
            _run_tool("ip", "netns", "add", side.name)
        first, second = (side.name for side in sides)
        _run_tool("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for side in sides:
            _run_tool("ip", "link", "set", side.name, "netns", side.name)
            _run_in_namespace(side, "ip", "addr", "add", f"{side.address}/24", "dev", side.name)
            _run_in_namespace(side, "ip", "link", "set", side.name, "up")
            _run_in_namespace(side, "ip", "link", "set", "lo", "up")
            _run_in_namespace(side, "tc", "qdisc", "add", "dev", side.name, "root", "tbf", *limit)
            _run_in_namespace(side, "sh", "-c", f"echo {_CONGESTION_CONTROL} > {_SETTING}")
        yield sides
    finally:
        for side in sides:
            subprocess.run(("ip", "netns", "del", side.name), check=False, capture_output=True)


def run_over_shaped_link(bits_per_second: int, ranks: int, program: Sequence[str]) -> int:
    """Run torchrun in each namespace and print the bytes sent; return the first exit code that is not 0, else 0."""
    with open_shaped_link(bits_per_second, f"kit{os.getpid()}") as sides:
        nodes = [_start_torchrun(side, sides[0].address, ranks, program) for side in sides]
        try:
            return _wait_for_nodes(nodes)
        finally:
            _end_nodes(nodes)
            for side in sides:
                print(f" > network: {side.name} sent {_sent_bytes(side)} bytes", flush=True)


def _remove_stale_namespaces() -> None:
    """Remove the namespaces of launchers that were killed before they could remove them."""
    for line in _run_tool("ip", "netns", "list").splitlines():
        match = re.match(r"kit(\d+)[ab]\b", line)
        if match and not Path(f"/proc/{match[1]}").exists():
            _run_tool("ip", "netns", "del", line.split()[0])


def _start_torchrun(
    side: LinkSide, master: str, ranks: int, program: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start half of the ranks under torchrun in the namespace of `side`."""
    flags = Nodes(NODES, side.rank, master).torchrun_flags(ranks // NODES)
    inside = ("ip", "netns", "exec", side.name)
    torchrun = (sys.executable, "-m", "torch.distributed.run", *flags)
    # gloo would use the address of the machine's name, which the namespace cannot reach.
    environment = {**os.environ, **dict.fromkeys(INTERFACES, side.name)}
    return subprocess.Popen((*inside, *torchrun, *program), env=environment)


def _wait_for_nodes(nodes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until one torchrun fails or all have ended; return the first exit code that is not 0, else 0."""
    while True:
        codes = [node.poll() for node in nodes]
        for code in codes:
            if code is not None and code != 0:
                return code
        if None not in codes:
            return 0
        time.sleep(_POLL_SECONDS)


def _end_nodes(nodes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End both torchruns and their ranks; torchrun itself would wait minutes for a failed node."""
    processes: list[psutil.Process] = []
    for node in nodes:
        if node.poll() is None:
            torchrun = psutil.Process(node.pid)
            processes += [torchrun, *torchrun.children(recursive=True)]
    end_processes(lambda: processes, _GRACE_SECONDS)
    for node in nodes:
        node.wait()


def _sent_bytes(side: LinkSide) -> int:
    """Return the bytes that a side has sent over the link; 0 if the kernel does not report them."""
    answer = _run_in_namespace(side, "cat", f"/sys/class/net/{side.name}/statistics/tx_bytes")
    return int(answer) if answer.strip().isdigit() else 0


def _run_in_namespace(side: LinkSide, *arguments: str) -> str:
    """Run a tool in the namespace of `side` and return its output."""
    return _run_tool("ip", "netns", "exec", side.name, *arguments)


def _run_tool(*arguments: str) -> str:
    """Run a tool and return its output; a failure exits the program with one sentence."""
    answer = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if answer.returncode:
        sys.exit(
            f"NET= cannot shape traffic here: '{' '.join(arguments)}': {answer.stderr.strip()}"
        )
    return answer.stdout


def _exit_on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's signature
    """Exit by an exception, so that the namespaces are removed on the way."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit_on_signal)
    rate, num_ranks, separator, *program = sys.argv[1:]
    sys.exit(run_over_shaped_link(parse_rate(rate), int(num_ranks), program))
