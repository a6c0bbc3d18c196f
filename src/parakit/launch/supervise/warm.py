"""Ranks of several runs forked from one process that has imported Megatron (`megatron_patches.warm`).

`WarmPool` has such processes for an experiment. In place of torchrun, the supervisor of a run starts
`python -m parakit.launch.supervise.warm SOCKET RANKS -- ENTRY FLAGS…`, which asks for the run's ranks and
waits for them; when it is ended, they are. `command.sh` shows torchrun, which prints the same.
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
"""Below Linux' `net.ipv4.ip_local_port_range`."""


class WarmMegatron:
    """The process that forks; it ends with this one, or with `close`."""

    module = "megatron_patches.warm"

    def __init__(self, entry: str, environment: Mapping[str, str]) -> None:
        self.entry = entry
        self._folder = Path(tempfile.mkdtemp(prefix="kit-warm-"))
        self._socket = self._folder / "socket"
        # Bound here, so that a request may come while Megatron is still being imported.
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._socket))
        listener.listen()
        self._log = (self._folder / "log.txt").open("wb")
        self._process = subprocess.Popen(
            (sys.executable, "-m", self.module, str(listener.fileno()), entry),
            pass_fds=(listener.fileno(),),
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.PIPE,  # Its end is this process's.
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        listener.close()

    @property
    def pid(self) -> int:
        """Of the process whose descendants are the ranks."""
        return self._process.pid

    def command(self, ranks: int, arguments: Sequence[str]) -> tuple[str, ...]:
        """What takes torchrun's place; `arguments` are the entry and its flags."""
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
        """Fork ranks that print to `output`; their exit status. After `seconds` they are ended."""
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
    """A process for each entry and environment of its import, to the end of the `with` block."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], WarmMegatron] = {}
        self._until = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._until.close()

    def get_process(self, entry: str, environment: Mapping[str, str]) -> WarmMegatron:
        """The one that has imported an entry under these variables."""
        kind = (entry, *sorted(environment.items()))
        if kind not in self._made:
            warm = WarmMegatron(entry, environment)
            self._made[kind] = self._until.enter_context(closing(warm))
        return self._made[kind]


def request_ranks(
    address: str,
    ranks: int,
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    output: int = 1,
    seconds: float | None = None,
) -> int:
    """Have ranks forked that print to a file descriptor; their exit status when they have ended.

    They are ended where this process ends, or waits for more than `seconds`.
    """
    request = {
        "ranks": ranks,
        "port": find_free_port(),
        "arguments": list(arguments),
        "environment": dict(environment),
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(seconds)
        try:
            server.connect(address)
            socket.send_fds(server, [json.dumps(request).encode()], [output])
            answer = server.recv(1)
        except TimeoutError:
            print(f"The ranks were ended after {seconds:.0f} s.", file=sys.stderr)
            return FAILED
        except OSError as error:
            answer = b""
            print(f"{address}: {error.strerror}", file=sys.stderr)
    if not answer:
        print("The process that forks the ranks has ended; train once more.", file=sys.stderr)
    return answer[0] if answer else FAILED


def find_free_port() -> int:
    """A port of this machine that nothing listens on now, and that the kernel gives to no socket that
    names none: gloo's listen on such, and one of another run could take it before rank 0 does."""
    for port in SystemRandom().sample(_UNASSIGNED, 100):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError(f"No port from {_UNASSIGNED[0]} to {_UNASSIGNED[-1]} was free in 100 tries.")


if __name__ == "__main__":
    place, count, _, *argv = sys.argv[1:]
    sys.exit(request_ranks(place, int(count), argv))
