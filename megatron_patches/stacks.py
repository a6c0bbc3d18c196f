"""Let a rank write its Python stacks when it gets a signal, even while it waits in C code.

`STACKS_SIGNAL` makes faulthandler write the stacks of all threads to `rank<N>.txt`. A thread sees that they were
written and writes the last calls that torch's flight recorder holds to `rank<N>.pkl`. The same happens before
SIGTERM ends a rank. When one rank has failed, the launcher ends the others with SIGTERM. gloo ends a rank if a
peer's call does not match, and only the calls of all ranks tell which of them is wrong.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib.metadata
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from parakit.artifacts.io import write_atomically
from parakit.artifacts.run import CALLS_SUFFIX, STACKS_SIGNAL
from parakit.config import variables
from parakit.config.flag_table import parse_release

RECORDED_CALLS = "1000"
"""Number of last calls that each rank's flight recorder keeps, enough for some iterations."""
_FIRST_WITH_NEW_NAMES = (2, 9)
"""First torch whose variables of the flight recorder are named FR and not NCCL. From then on torch warns
of the older names."""
_POLL_SECONDS = 0.5
"""Seconds between two looks at whether stacks were written."""
_NEXT_PIECE_SECONDS = 0.1
"""Seconds to wait for the next piece of stacks; faulthandler writes them in many pieces."""
_PIECE_BYTES = 1 << 16
_COMPILER = "torch._inductor"


def dump_stacks_on_request() -> None:
    """Install the signal handlers and the thread that write this rank's stacks and last calls.

    The folder is in the environment variable `variables.STACKS`; without it nothing is done. It must be
    called before torch makes a process group, because it sets the variables of torch's flight recorder.
    An exception out of a collective also makes the rank write its last calls.
    """
    folder = os.environ.get(variables.STACKS)
    if folder is None:
        return
    path = Path(folder) / f"rank{os.environ.get('RANK', '0')}.txt"
    # The file stays open for as long as the process lives, because the handler may not open files.
    stacks_file = path.open("a")
    faulthandler.register(STACKS_SIGNAL, file=stacks_file, all_threads=True, chain=False)
    # A rank that waits in C code runs no Python handler. faulthandler therefore writes to a pipe on SIGTERM,
    # and the thread that reads the pipe writes the last calls and ends the process.
    sigterm_pipe, sigterm_output = os.pipe()
    faulthandler.register(signal.SIGTERM, file=sigterm_output, all_threads=True, chain=False)
    # Once the interpreter ends, the thread no longer reads the pipe, so SIGTERM must end the process.
    atexit.register(faulthandler.unregister, signal.SIGTERM)
    # Forked workers of data loaders have no such thread, so SIGTERM must end them directly.
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))
    for name, value in _recorder_variables(path.with_name("watchdog-rank")).items():
        os.environ.setdefault(name, value)
    thread_arguments = (stacks_file, path, sigterm_pipe)
    threading.Thread(target=_write_on_signals, args=thread_arguments, daemon=True).start()
    sys.excepthook = functools.partial(_write_calls_of_failure, path, sys.excepthook)


def _recorder_variables(dumps: Path) -> dict[str, str]:
    """Return the environment variables of torch's flight recorder.

    On GPUs they include those of NCCL's watchdog, which writes the recorder to `dumps<N>` on a timeout.
    """
    is_new = parse_release(importlib.metadata.version("torch")) >= _FIRST_WITH_NEW_NAMES
    size_variable = "TORCH_FR_BUFFER_SIZE" if is_new else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    settings = {size_variable: RECORDED_CALLS}
    if os.environ.get(variables.DEVICE) == "gpu":
        file_variable = "TORCH_FR_DUMP_TEMP_FILE" if is_new else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
        # Megatron 0.19 would set the last two so that dumps lack completed calls and call sites.
        settings |= {
            file_variable: str(dumps),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_INCLUDE_ONLY_ACTIVE": "0",
            "TORCH_INCLUDE_STACK_TRACE": "1",
        }
    return settings


def _write_on_signals(stacks: TextIO, path: Path, sigterm_pipe: int) -> None:
    """Write the last calls after stacks were written, and let SIGTERM end the process after that.

    This is the thread's function and does not return.

    Args:
        stacks: The file to which the handler of `STACKS_SIGNAL` writes.
        path: Path of that file; the calls are written beside it with another suffix.
        sigterm_pipe: The pipe to which the handler of SIGTERM writes stacks.
    """
    has_written_calls = False
    while True:
        is_ending = False
        for piece in _read_pieces(sigterm_pipe):
            is_ending = True
            # Stacks of a hang, if there are any, are kept: they say more than those at the end.
            if not has_written_calls:
                stacks.write(piece.decode(errors="replace"))
                stacks.flush()
        if not has_written_calls and os.fstat(stacks.fileno()).st_size:
            has_written_calls = True
            write_atomically(path.with_suffix(CALLS_SUFFIX), pickle.dumps(_recorded_calls()))
        if is_ending:
            faulthandler.unregister(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)


def _read_pieces(pipe: int) -> Iterator[bytes]:
    """Yield the pieces of stacks in a pipe until no further piece comes; nothing if none comes within _POLL_SECONDS."""
    seconds = _POLL_SECONDS
    while select.select([pipe], [], [], seconds)[0]:
        yield os.read(pipe, _PIECE_BYTES)
        seconds = _NEXT_PIECE_SECONDS


def _write_calls_of_failure(
    path: Path, excepthook: Any, kind: Any, error: BaseException, trace: Any
) -> None:
    """Write the last calls if the exception came out of a collective, then call `excepthook`.

    The last three arguments are those of `sys.excepthook`.
    """
    frames = traceback.extract_tb(trace)
    if frames and "/torch/distributed/" in frames[-1].filename:
        # The launcher deletes the folder when it has written the run's end.
        with suppress(OSError):
            write_atomically(path.with_suffix(CALLS_SUFFIX), pickle.dumps(_recorded_calls()))
    excepthook(kind, error, trace)


def _recorded_calls() -> dict[str, Any]:
    """Return the dump of the flight recorders, with the ranks of every process group.

    gloo's dump lacks the ranks of the groups, so they are added. Without torch.distributed no call is listed.
    """
    if "torch.distributed" not in sys.modules:
        return {"entries": [], "dumped_ns": time.time_ns()}
    from torch.distributed import distributed_c10d

    # torch would import its compiler, which takes 9 s of a core, to look up frames of compiled code. An
    # empty module in its place prevents that.
    empty_module = ModuleType(_COMPILER)
    is_replaced = sys.modules.setdefault(_COMPILER, empty_module) is empty_module
    dump = _read_recorders()
    if is_replaced:
        del sys.modules[_COMPILER]
    world = distributed_c10d._world
    dump["pg_config"] = {}
    for group, name in world.pg_names.items():
        index_by_rank = world.pg_group_ranks[group]
        dump["pg_config"][name] = {
            "name": name,
            "desc": group.group_desc,
            "ranks": sorted(index_by_rank, key=index_by_rank.__getitem__),
        }
    dump["dumped_ns"] = time.time_ns()
    return dump


def _read_recorders() -> dict[str, Any]:
    """Return the dump of torch's flight recorders.

    gloo's and NCCL's calls are in separate recorders. They are merged by time and numbered again.
    """
    from torch._C import _distributed_c10d as c10d

    dump: dict[str, Any] = pickle.loads(c10d._dump_fr_trace())  # noqa: S301 - this process made it
    # torch's builds for CPUs do not have this function.
    dump_nccl_trace = getattr(c10d, "_dump_nccl_trace", None)
    if dump_nccl_trace:
        nccl_dump = pickle.loads(dump_nccl_trace())  # noqa: S301
        entries = sorted(dump["entries"] + nccl_dump["entries"], key=itemgetter("time_created_ns"))
        dump["entries"] = [{**entry, "record_id": index} for index, entry in enumerate(entries)]
    return dump
