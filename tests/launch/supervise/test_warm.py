"""Ranks forked from one process: what they are given."""

import socket
from pathlib import Path

from tools.launch.supervise.warm import free_port


def test_a_ranks_port_is_none_that_sockets_get_which_name_none() -> None:
    assigned = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    port = free_port()
    assert 1024 <= port < int(assigned[0])
    with socket.create_server(("", port)):
        others = {free_port() for _ in range(20)}
    assert port not in others
