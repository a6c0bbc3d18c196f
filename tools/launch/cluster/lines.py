"""JSON, one object a line, over a socket: what the launchers of a run's nodes say to each other."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

LONGEST_LINE_BYTES = 1 << 20
"""Far above what a node has to say; more is no node of ours."""


class LineError(Exception):
    """What came is not a line of ours."""


class Lines:
    """One connection between two launchers."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""
        self._ended = False
        # A machine that vanishes sends no goodbye: the kernel asks after 10 s of silence, thrice.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 10),
            (socket.TCP_KEEPINTVL, 5),
            (socket.TCP_KEEPCNT, 3),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def ended(self) -> bool:
        """Whether the other side has closed, or is lost, and everything it said was read."""
        return self._ended and b"\n" not in self._received

    def send(self, **message: object) -> None:
        """Say something; a lost connection is told by `receive`, not here."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._ended = True

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None if none came in time or the other side is gone.

        Raises:
            LineError: Something else speaks there.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if self._ended or not self._read(max(0.0, deadline - time.monotonic())):
                return None
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise LineError(repr(line[:80]))
        return message

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def _read(self, seconds: float) -> bool:
        self.socket.settimeout(seconds or 0.001)
        try:
            data = self.socket.recv(65536)
        except TimeoutError:
            return False
        except OSError:
            data = b""
        finally:
            self.socket.settimeout(None)
        self._ended = not data
        self._received += data
        if len(self._received) > LONGEST_LINE_BYTES:
            raise LineError("a line without end")
        return True
