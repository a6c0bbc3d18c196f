"""Ranks forked from one process: what they are given."""

import socket

from parakit.launch.supervise.warm import find_free_port


def test_a_ranks_port_is_none_that_sockets_get_which_name_none() -> None:
    port = find_free_port()
    assert 15000 <= port < 32768
    with socket.create_server(("", port)):
        ports = {find_free_port() for _ in range(20)}
    assert port not in ports
