"""What a rank is doing, on request: SIGUSR1 writes its Python stacks, even while it waits in C code.

A thread sees that they were written and adds the last calls that torch's flight recorder kept. It does
the same before SIGTERM ends the rank, as it does the others when one has failed: gloo ends a rank whose
peer's call does not fit its own, and only the calls of all tell whose is wrong.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from tools.records.io import write_whole
from tools.records.run import CALLS_SUFFIX
from tools.spec import variables

RECORDED_CALLS = "1000"
"""Of each rank; some iterations."""
# The second is the name up to torch 2.8.
_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_LOOK_SECONDS, _PIECE_SECONDS = 0.5, 0.1
_COMPILER = "torch._inductor"


def dump_stacks_on_request() -> None:
    """From now on SIGUSR1 adds the stacks of all threads to `rank<N>.txt` in the folder.

    The last calls follow in `rank<N>.pkl`. To be called before torch makes a group.
    """
    folder = os.environ.get(variables.STACKS)
    if folder is None:
        return
    path = Path(folder) / f"rank{os.environ.get('RANK', '0')}.txt"
    # Stays open for as long as the process lives: the handler may not open files.
    file = path.open("a")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
    ending, told = os.pipe()
    faulthandler.register(signal.SIGTERM, file=told, all_threads=True, chain=False)
    # Its thread answers no more once the interpreter ends.
    atexit.register(faulthandler.unregister, signal.SIGTERM)
    # Workers that load data are ended by it as ever.
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))
    for name in _RECORDER:
        os.environ.setdefault(name, RECORDED_CALLS)
    threading.Thread(target=_answer, args=(file, path, ending), daemon=True).start()
    sys.excepthook = functools.partial(_failed, path, sys.excepthook)


def _answer(stacks: TextIO, path: Path, ending: int) -> None:
    is_written = False
    while True:
        is_ending, seconds = False, _LOOK_SECONDS
        # A handler writes in pieces.
        while select.select([ending], [], [], seconds)[0]:
            piece = os.read(ending, 1 << 16)
            is_ending, seconds = True, _PIECE_SECONDS
            # Where a rank hung says more than where it was when it was ended for that.
            if not is_written:
                stacks.write(piece.decode(errors="replace"))
                stacks.flush()
        if not is_written and os.fstat(stacks.fileno()).st_size:
            is_written = True
            write_whole(path.with_suffix(CALLS_SUFFIX), pickle.dumps(_recorded_calls()))
        if is_ending:
            faulthandler.unregister(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)


def _failed(path: Path, usual: Any, kind: Any, error: BaseException, trace: Any) -> None:
    """As `sys.excepthook`; what came out of a collective leaves the calls before it."""
    frames = traceback.extract_tb(trace)
    if frames and "/torch/distributed/" in frames[-1].filename:
        with suppress(OSError):  # The folder is gone once the run's end was written.
            write_whole(path.with_suffix(CALLS_SUFFIX), pickle.dumps(_recorded_calls()))
    usual(kind, error, trace)


def _recorded_calls() -> dict[str, Any]:
    """The flight recorder's dump, with what gloo leaves out: the ranks of every group."""
    if "torch.distributed" not in sys.modules:
        return {"entries": [], "dumped_ns": time.time_ns()}
    from torch._C import _distributed_c10d as c10d
    from torch.distributed import distributed_c10d

    # For its frames torch would import inductor, 9 s of a core, to ask it for code that it compiled.
    none = ModuleType(_COMPILER)
    is_ours = sys.modules.setdefault(_COMPILER, none) is none
    found: dict[str, Any] = pickle.loads(c10d._dump_fr_trace())  # noqa: S301 - this process made it
    if is_ours:
        del sys.modules[_COMPILER]
    world = distributed_c10d._world
    found["pg_config"] = {
        name: {
            "name": name,
            "desc": group.group_desc,
            "ranks": sorted(places, key=places.__getitem__),
        }
        for group, name in world.pg_names.items()
        for places in [world.pg_group_ranks[group]]
    }
    found["dumped_ns"] = time.time_ns()
    return found
