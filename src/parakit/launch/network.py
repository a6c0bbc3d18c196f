"""Two network namespaces connected by a shaped link, each a node of the run: `NET=1gbps make train-…`.

python -m parakit.launch.network 1gbps 2 -- -m megatron_patches ENTRY FLAGS…

CPU ranks are split evenly between the two; what they send each other crosses a veth pair whose ends a
token bucket (tc tbf) limits. Namespaces and link are removed at the end of the run, however it ends.
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
"""gloo moves 12 to 14 Gbit/s between two processes here; a faster limit would limit nothing."""

_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[mg])bps", re.IGNORECASE)
_UNIT_BITS = {"m": 10**6, "g": 10**9}
_CONGESTION_CONTROL = "reno"
"""Fills a link that loses nothing, and every namespace may choose it. A machine's own choice may pace
and probe, as bbr does, which slows the first megabytes after a pause and stops every ten seconds."""
_SETTING = "/proc/sys/net/ipv4/tcp_congestion_control"
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 3.0
"""Less than the launcher's own, so that the namespaces are removed before it forces anything."""


def format_rate(bits_per_second: int) -> str:
    """As it is asked for: `NET=2.5gbps`."""
    unit = "g" if bits_per_second >= _UNIT_BITS["g"] else "m"
    return f"{bits_per_second / _UNIT_BITS[unit]:g}{unit}bps"


def parse_rate(text: str) -> int:
    """Bits a second, each way, of `1gbps`, `2.5gbps` or `200mbps`.

    Raises:
        ValueError: It is none.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match["number"]) == 0:
        raise ValueError(f"{text} is not a rate such as 1gbps or 200mbps")
    return round(float(match["number"]) * _UNIT_BITS[match["unit"].lower()])


def network_problems(bits_per_second: int, ranks: int, device: DeviceKind) -> Iterator[str]:
    """Why this machine cannot shape this run's traffic."""
    asked = f"NET={format_rate(bits_per_second)}"
    if device is not DeviceKind.CPU:
        yield f"{asked} shapes traffic between CPU ranks; name a target that ends in cpu."
    if ranks % NODES:
        yield f"{asked} puts half of the ranks on each side of a link, and {ranks} is odd."
    if bits_per_second > FASTEST_BITS_PER_SECOND:
        yield (
            f"{asked} is more than CPU ranks reach unshaped (12 to 14 Gbit/s), so it would measure "
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
    """What runs a program's ranks on both sides of a link of so many bits a second."""
    return (python, "-m", "parakit.launch.network", format_rate(bits), str(ranks), "--", *program)


@dataclass(frozen=True)
class LinkSide:
    """One end of the link: a node of its own."""

    rank: int
    name: str
    """Of its namespace, and of the device in it."""
    address: str


@contextmanager
def open_shaped_link(bits_per_second: int, name: str) -> Iterator[tuple[LinkSide, ...]]:
    """Two namespaces, whose names begin with `name`, connected while the block runs."""
    # A millisecond's worth, and never less than a segment of 64 KiB, which veth passes on undivided.
    burst = max(bits_per_second // 8 // 1000, 128 << 10)
    limit = ("rate", f"{bits_per_second}bit", "burst", str(burst), "latency", "50ms")
    _remove_left_over()
    sides = tuple(
        LinkSide(rank, f"{name}{letter}", f"10.77.0.{rank + 1}") for rank, letter in enumerate("ab")
    )
    try:
        for side in sides:
            _do("ip", "netns", "add", side.name)
        one, two = (side.name for side in sides)
        _do("ip", "link", "add", one, "type", "veth", "peer", "name", two)
        for side in sides:
            _do("ip", "link", "set", side.name, "netns", side.name)
            _inside(side, "ip", "addr", "add", f"{side.address}/24", "dev", side.name)
            _inside(side, "ip", "link", "set", side.name, "up")
            _inside(side, "ip", "link", "set", "lo", "up")
            _inside(side, "tc", "qdisc", "add", "dev", side.name, "root", "tbf", *limit)
            _inside(side, "sh", "-c", f"echo {_CONGESTION_CONTROL} > {_SETTING}")
        yield sides
    finally:
        for side in sides:
            subprocess.run(("ip", "netns", "del", side.name), check=False, capture_output=True)


def run_over_shaped_link(bits_per_second: int, ranks: int, program: Sequence[str]) -> int:
    """One torchrun in each namespace; the first exit code that is not 0."""
    with open_shaped_link(bits_per_second, f"kit{os.getpid()}") as sides:
        nodes = [_started(side, sides[0].address, ranks, program) for side in sides]
        try:
            return _wait(nodes)
        finally:
            _end(nodes)
            for side in sides:
                print(f" > network: {side.name} sent {_sent_bytes(side)} bytes", flush=True)


def _remove_left_over() -> None:
    """Remove namespaces of launchers that were killed before they could."""
    for line in _do("ip", "netns", "list").splitlines():
        match = re.match(r"kit(\d+)[ab]\b", line)
        if match and not Path(f"/proc/{match[1]}").exists():
            _do("ip", "netns", "del", line.split()[0])


def _started(
    side: LinkSide, master: str, ranks: int, program: Sequence[str]
) -> subprocess.Popen[bytes]:
    flags = Nodes(NODES, side.rank, master).torchrun_flags(ranks // NODES)
    inside = ("ip", "netns", "exec", side.name)
    torchrun = (sys.executable, "-m", "torch.distributed.run", *flags)
    # gloo would take the address of the machine's name, which the namespace cannot reach.
    environment = {**os.environ, **dict.fromkeys(INTERFACES, side.name)}
    return subprocess.Popen((*inside, *torchrun, *program), env=environment)


def _wait(nodes: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [node.poll() for node in nodes]
        failed = next((code for code in codes if code), None)
        if failed is not None or None not in codes:
            return failed or 0
        time.sleep(_POLL_SECONDS)


def _end(nodes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, then SIGKILL: torchrun itself would wait minutes for a failed node."""
    family = [psutil.Process(node.pid) for node in nodes if node.poll() is None]
    family += [child for parent in family for child in parent.children(recursive=True)]
    end_processes(lambda: family, _GRACE_SECONDS)
    for node in nodes:
        node.wait()


def _sent_bytes(side: LinkSide) -> int:
    answer = _inside(side, "cat", f"/sys/class/net/{side.name}/statistics/tx_bytes")
    return int(answer) if answer.strip().isdigit() else 0


def _inside(side: LinkSide, *words: str) -> str:
    return _do("ip", "netns", "exec", side.name, *words)


def _do(*words: str) -> str:
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    if answer.returncode:
        sys.exit(f"NET= cannot shape traffic here: '{' '.join(words)}': {answer.stderr.strip()}")
    return answer.stdout


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's signature
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    wanted, count, separator, *words = sys.argv[1:]
    sys.exit(run_over_shaped_link(parse_rate(wanted), int(count), words))
