"""Fork the ranks of short runs from one process that has imported Megatron.

`python -m megatron_patches.warm DESCRIPTOR ENTRY`

Importing torch and Megatron takes most of the time of a short run. This server imports and patches them
once, then listens on the socket with the number DESCRIPTOR. Each request describes a run: its arguments,
its environment, its number of ranks, a free port for them and the file that they print to. For each
request the server forks a leader in a session of its own, and the leader forks the ranks. Like torchrun,
the leader ends all ranks when one fails or when the caller is gone. The server starts no threads, because
a process with threads must not fork. It ends when its standard input ends.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import inspect
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import NoReturn

from megatron_patches.__main__ import announce, enter
from megatron_patches.context import find_context
from megatron_patches.entry import freeze_imports
from megatron_patches.registry import apply_patches
from megatron_patches.stacks import dump_stacks_on_request
from parakit.config import variables

REQUEST_BYTES = 1 << 20
"""Largest size of a request."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 4.0
"""Seconds from SIGTERM to SIGKILL, as in the launcher's supervisor."""


@dataclass(frozen=True)
class WarmRank:
    """The rank that a forked process becomes."""

    number: int
    """Number of this rank from 0."""
    ranks: int
    """Number of ranks of the run."""
    port: int
    """Port on which the ranks find each other."""
    arguments: list[str]
    """The entry and its flags, the content of `sys.argv`."""
    environment: dict[str, str]


def main(descriptor: int, entry: Path) -> None:
    """Import and patch Megatron, then fork ranks until standard input ends.

    Only the server returns. Each forked rank trains and ends in this function.
    """
    with socket.socket(fileno=descriptor) as listener:
        with freeze_imports():
            from megatron_patches.catalogue import PATCHES

            context = find_context(entry, os.environ[variables.DEVICE])
            sys.path.insert(0, str(entry.resolve().parent))
            applied = apply_patches(PATCHES, context)
            code = compile(entry.read_bytes(), str(entry), "exec")
            exec(code, {"__name__": "entry", "__file__": str(entry)})  # noqa: S102 - for what it imports
            read_help_once()
        rank = _serve(listener)
    if rank is None:
        return
    _become_rank(rank)
    # Some patches, such as the one of the communication log, are switched on by a run's environment.
    late_patches = [patch for patch in PATCHES if patch.name not in applied]
    all_applied = (*applied, *apply_patches(late_patches, context))
    announce(context, [patch.name for patch in PATCHES if patch.name in all_applied])
    _train(code, str(entry))


def _train(code: CodeType, entry: str) -> NoReturn:
    """Run the entry's code and end the process without Python's usual finalization.

    The finalization goes through all objects of torch and Megatron, which takes as long as a run of a
    tiny model. Children of multiprocessing skip it as well. An exception, or an exit with another code
    than 0, ends the process as usual, with its traceback.
    """
    try:
        enter(code, entry)
    except SystemExit as exit_request:
        if exit_request.code:
            raise
    # The interpreter waits for threads in the same way.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def read_help_once() -> None:
    """Make Megatron's parser of flags once and cache the source code that it reads.

    The parser takes the help of flags from the source of 28 classes. Forked ranks then find it in memory.
    """
    from megatron.training import arguments

    inspect.getsource = functools.cache(inspect.getsource)  # type: ignore[assignment]
    if hasattr(arguments, "add_megatron_arguments"):
        arguments.add_megatron_arguments(argparse.ArgumentParser())


def _serve(listener: socket.socket) -> WarmRank | None:
    """Fork a leader for every request on `listener` until standard input ends.

    The function returns None in the server, and the rank in each forked rank.
    """
    # Ctrl-C in a terminal reaches this process as well; the launcher handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], 10 * POLL_SECONDS)
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        if sys.stdin in ready:
            return None
        if listener in ready:
            caller, _ = listener.accept()
            if os.fork() == 0:
                return _lead(caller)
            caller.close()


def _lead(caller: socket.socket) -> WarmRank:
    """Fork the ranks of a request, wait for them, and send one byte, 0 or 1, to the caller.

    The leader process ends in this function. Only the forked ranks return, each with its own `WarmRank`.
    """
    status = 1
    try:
        os.setsid()
        message, files, _, _ = socket.recv_fds(caller, REQUEST_BYTES, 1)
        request = json.loads(message)
        os.dup2(files[0], 1)
        os.dup2(files[0], 2)
        rank_by_pid: dict[int, int] = {}
        for number in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                caller.close()
                return WarmRank(number, **request)
            rank_by_pid[pid] = number
        status = _wait_for_ranks(rank_by_pid, caller)
        caller.send(bytes([status]))
    except Exception:
        traceback.print_exc()
    os._exit(status)


def _become_rank(rank: WarmRank) -> None:
    """Set the environment, arguments and signal handlers of a rank in this process.

    The environment gets the variables that torchrun would set, and the process is named `rank<N>`, by
    which the launcher finds it.
    """
    torchrun_variables = {
        "WORLD_SIZE": str(rank.ranks),
        "LOCAL_WORLD_SIZE": str(rank.ranks),
        "RANK": str(rank.number),
        "LOCAL_RANK": str(rank.number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rank.port),
    }
    os.environ.clear()
    os.environ.update(rank.environment | torchrun_variables)
    Path("/proc/self/comm").write_text(f"rank{rank.number}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = rank.arguments
    dump_stacks_on_request()


def _wait_for_ranks(rank_by_pid: dict[int, int], caller: socket.socket) -> int:
    """Return 0 when all ranks have ended with exit code 0, else 1.

    When one rank fails, the others are ended and the failure is printed. When the caller closes its
    socket, all ranks are ended.
    """
    running = dict(rank_by_pid)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            if code != 0:
                _end_ranks(running)
                _print_failure(rank, pid, code)
                return 1
        elif select.select([caller], [], [], POLL_SECONDS)[0]:
            _end_ranks(running)
            return 1
    return 0


def _end_ranks(running: dict[int, int]) -> None:
    """Send SIGTERM to the processes, and SIGKILL to those that still run after `GRACE_SECONDS`.

    The keys of `running` are process ids; each is removed when its process has ended.
    """
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running:
            os.kill(pid, signal_number)
        deadline = time.monotonic() + GRACE_SECONDS
        while running and time.monotonic() < deadline:
            ended_pid, _ = os.waitpid(-1, os.WNOHANG)
            if running.pop(ended_pid, None) is None:
                time.sleep(POLL_SECONDS)


def _print_failure(rank: int, pid: int, code: int) -> None:
    """Print a rank's failure in torchrun's lines, which the report reads; `code` is minus the signal."""
    cause = ""
    if code < 0:
        cause = f"Signal {-code} ({signal.Signals(-code).name}) received by PID {pid}"
    lines = (
        "",  # A library may have printed a last line without its end.
        "Root Cause (first observed failure):",
        f"  rank      : {rank} (local_rank: {rank})",
        f"  exitcode  : {code} (pid: {pid})",
        f"  traceback : {cause}",
    )
    print("\n".join(lines), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
