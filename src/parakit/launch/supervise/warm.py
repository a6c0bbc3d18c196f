"""Fork the ranks of several runs from one process that has imported Megatron (`megatron_patches.warm`).

`WarmPool` starts such processes for an experiment. In place of torchrun, the supervisor of a run starts
`python -m parakit.launch.supervise.warm SOCKET RANKS -- ENTRY FLAGS…`. That client asks for the run's ranks
and waits for them. If the client is ended, the ranks are ended too. `command.sh` shows torchrun, which trains
the same.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import SystemRandom
from typing import IO, Self

from parakit.config.files import ROOT

FAILED = 1
_UNASSIGNED = range(15000, 32768)
"""Ports below Linux' `net.ipv4.ip_local_port_range`, which the kernel assigns to no socket by itself."""


class WarmMegatron:
    """A process that has imported Megatron and forks ranks; it ends with this process, or with `close`."""

    module = "megatron_patches.warm"

    def __init__(self, entry: str, environment: Mapping[str, str]) -> None:
        self.entry = entry
        self._folder = Path(tempfile.mkdtemp(prefix="kit-warm-"))
        self._socket = self._folder / "socket"
        # The socket is bound here, so that a request may come while Megatron is still being imported.
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._socket))
        listener.listen()
        self._log = (self._folder / "log.txt").open("wb")
        self._process = subprocess.Popen(
            (sys.executable, "-m", self.module, str(listener.fileno()), entry),
            pass_fds=(listener.fileno(),),
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.PIPE,  # The process ends when this pipe closes, at the latest with this one.
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        listener.close()

    @property
    def pid(self) -> int:
        """Id of the process whose descendants are the ranks."""
        return self._process.pid

    def command(self, ranks: int, arguments: Sequence[str]) -> tuple[str, ...]:
        """Return the command in torchrun's place; `arguments` are the entry script and its flags."""
        client = (sys.executable, "-m", "parakit.launch.supervise.warm")
        return (*client, str(self._socket), str(ranks), "--", *arguments)

    def run(
        self,
        ranks: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes],
        seconds: float,
    ) -> int:
        """Fork ranks that print to `output`, and return their exit status; after `seconds` they are ended."""
        address, printed = str(self._socket), output.fileno()
        return request_ranks(address, ranks, arguments, environment, printed, seconds)

    def close(self) -> None:
        """End the process; its ranks have ended before, with their runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder)


class WarmPool:
    """The warm processes of a `with` block. There is one per entry script and set of environment variables."""

    def __init__(self) -> None:
        self._process_by_key: dict[tuple[object, ...], WarmMegatron] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def get_process(self, entry: str, environment: Mapping[str, str]) -> WarmMegatron:
        """Return the process that has imported an entry script under these variables; it is started if needed."""
        key = (entry, *sorted(environment.items()))
        if key not in self._process_by_key:
            warm = WarmMegatron(entry, environment)
            self._process_by_key[key] = self._closing.enter_context(closing(warm))
        return self._process_by_key[key]


def request_ranks(
    address: str,
    ranks: int,
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    output: int = 1,
    seconds: float | None = None,
) -> int:
    """Ask the warm process to fork ranks that print to a file descriptor. Wait for their end, and return their
    exit status.

    The ranks are ended if this process ends, or after `seconds`; None sets no limit.
    """
    request = {
        "ranks": ranks,
        "port": find_free_port(),
        "arguments": list(arguments),
        "environment": dict(environment),
    }
    answer = b""
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(seconds)
        try:
            server.connect(address)
            socket.send_fds(server, [json.dumps(request).encode()], [output])
            # The answer is one byte, the exit status. It is empty if the warm process has ended.
            answer = server.recv(1)
        except TimeoutError:
            print(f"The ranks were ended after {seconds:.0f} s.", file=sys.stderr)
            return FAILED
        except OSError as error:
            print(f"{address}: {error.strerror}", file=sys.stderr)
    if not answer:
        print("The process that forks the ranks has ended; train once more.", file=sys.stderr)
        return FAILED
    return answer[0]


def find_free_port() -> int:
    """Return a port of this machine on which nothing listens now.

    The port is outside of the range from which the kernel assigns free ports. gloo's sockets use assigned ports,
    so a socket of another run cannot take this port before rank 0 listens on it.
    """
    for port in SystemRandom().sample(_UNASSIGNED, 100):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError(f"No port from {_UNASSIGNED[0]} to {_UNASSIGNED[-1]} was free in 100 tries.")


if __name__ == "__main__":
    socket_path, num_ranks, _, *argv = sys.argv[1:]
    sys.exit(request_ranks(socket_path, int(num_ranks), argv))
