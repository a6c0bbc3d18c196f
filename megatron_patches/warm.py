"""Ranks forked from a process that has imported Megatron.

`python -m megatron_patches.warm DESCRIPTOR ENTRY`

Importing torch and Megatron takes most of a short run. This process does it once, patched as ranks are,
and listens. Each request names a run: its arguments, its environment, its number of ranks, a free port
for them and the file that they print to. A leader in a session of its own is forked for it, and forks
the ranks; it ends them all when one fails or when whoever asked is gone, as torchrun does. The process
begins no threads, because one with threads must not fork; it ends when its standard input ends.
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
from megatron_patches.entry import kept_imports
from megatron_patches.registry import apply_patches
from megatron_patches.stacks import dump_stacks_on_request
from parakit.config import variables

REQUEST_BYTES = 1 << 20
POLL_SECONDS = 0.05
GRACE_SECONDS = 4.0
"""From SIGTERM to SIGKILL, as the supervisor has it."""


@dataclass(frozen=True)
class Rank:
    """What one forked process is to be."""

    number: int
    ranks: int
    port: int
    arguments: list[str]
    """The entry and its flags, as `sys.argv` has them."""
    environment: dict[str, str]


def main(descriptor: int, entry: Path) -> None:
    """Import and serve; returns in the server at last. Each rank ends here, with its training."""
    with socket.socket(fileno=descriptor) as listener:
        with kept_imports():
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
    _take_place(rank)
    # Those that only this run's environment asks for, such as the ledger's.
    further = apply_patches([each for each in PATCHES if each.name not in applied], context)
    announce(context, [each.name for each in PATCHES if each.name in (*applied, *further)])
    _train(code, str(entry))


def _train(code: CodeType, entry: str) -> NoReturn:
    """Run the entry, and end without the interpreter's own end, as children of multiprocessing do.

    That looks through all that torch and Megatron are: as long as a run of a tiny model takes. What
    fails ends as any process does, with its traceback.
    """
    try:
        enter(code, entry)
    except SystemExit as asked:
        if asked.code:
            raise
    threading._shutdown()  # type: ignore[attr-defined]  # Waits for threads, as the interpreter does.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def read_help_once() -> None:
    """The flags' help, which Megatron's parser finds in the source of 28 classes: not in every rank."""
    from megatron.training import arguments

    inspect.getsource = functools.cache(inspect.getsource)  # type: ignore[assignment]
    if hasattr(arguments, "add_megatron_arguments"):
        arguments.add_megatron_arguments(argparse.ArgumentParser())


def _serve(listener: socket.socket) -> Rank | None:
    """Fork a leader for every request; returns in the ranks, and None when standard input has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal's Ctrl-C is the launcher's to handle.
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


def _lead(caller: socket.socket) -> Rank:
    """In the leader: forks the ranks, in which alone it returns."""
    status = 1
    try:
        os.setsid()
        words, files, _, _ = socket.recv_fds(caller, REQUEST_BYTES, 1)
        request = json.loads(words)
        os.dup2(files[0], 1)
        os.dup2(files[0], 2)
        children: dict[int, int] = {}
        for number in range(request["ranks"]):
            child = os.fork()
            if child == 0:
                caller.close()
                return Rank(number, **request)
            children[child] = number
        status = _watch(children, caller)
        caller.send(bytes([status]))
    except Exception:
        traceback.print_exc()
    os._exit(status)


def _take_place(rank: Rank) -> None:
    """The variables that torchrun would set, and a name by which the launcher finds the process."""
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(rank.ranks))
    numbers = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank.number))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rank.port)}
    os.environ.clear()
    os.environ.update(rank.environment | sizes | numbers | where)
    Path("/proc/self/comm").write_text(f"rank{rank.number}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = rank.arguments
    dump_stacks_on_request()


def _watch(ranks: dict[int, int], caller: socket.socket) -> int:
    """Wait; 0 if all ranks ended well. Ends them all when one fails, or when the caller is gone."""
    running = dict(ranks)
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            rank, code = running.pop(child), os.waitstatus_to_exitcode(status)
            if code != 0:
                _end(running)
                _report(rank, child, code)
                return 1
        elif select.select([caller], [], [], POLL_SECONDS)[0]:
            _end(running)
            return 1
    return 0


def _end(running: dict[int, int]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running:
            os.kill(pid, number)
        deadline = time.monotonic() + GRACE_SECONDS
        while running and time.monotonic() < deadline:
            child, _ = os.waitpid(-1, os.WNOHANG)
            if running.pop(child, None) is None:
                time.sleep(POLL_SECONDS)


def _report(rank: int, pid: int, code: int) -> None:
    """The failure in the lines that torchrun would print, which the report reads."""
    how = f"Signal {-code} ({signal.Signals(-code).name}) received by PID {pid}" if code < 0 else ""
    lines = (
        "",  # What a library prints at the end of a process need not end its line.
        "Root Cause (first observed failure):",
        f"  rank      : {rank} (local_rank: {rank})",
        f"  exitcode  : {code} (pid: {pid})",
        f"  traceback : {how}",
    )
    print("\n".join(lines), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
