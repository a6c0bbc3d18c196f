"""What a rank is doing, on request: a signal writes its Python stacks, even while it waits in C code.

A thread sees that they were written and adds the last calls that torch's flight recorder kept. It does
the same before SIGTERM ends the rank, as it does the others when one has failed: gloo ends a rank whose
peer's call does not fit its own, and only the calls of all tell whose is wrong.
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
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from parakit.artifacts.io import write_whole
from parakit.artifacts.run import CALLS_SUFFIX, STACKS_SIGNAL
from parakit.config import variables
from parakit.config.flag_table import release

RECORDED_CALLS = "1000"
"""Of each rank; some iterations."""
_FIRST_NAMED_FR = (2, 9)
"""The torch from which on its variables are not named after NCCL; it warns of the older names."""
_LOOK_SECONDS, _PIECE_SECONDS = 0.5, 0.1
_COMPILER = "torch._inductor"


def dump_stacks_on_request() -> None:
    """From now on `STACKS_SIGNAL` adds the stacks of all threads to `rank<N>.txt` in the folder.

    The last calls follow in `rank<N>.pkl`. To be called before torch makes a group.
    """
    folder = os.environ.get(variables.STACKS)
    if folder is None:
        return
    path = Path(folder) / f"rank{os.environ.get('RANK', '0')}.txt"
    # Stays open for as long as the process lives: the handler may not open files.
    file = path.open("a")
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    ending, told = os.pipe()
    faulthandler.register(signal.SIGTERM, file=told, all_threads=True, chain=False)
    # Its thread answers no more once the interpreter ends.
    atexit.register(faulthandler.unregister, signal.SIGTERM)
    # Workers that load data are ended by it as ever.
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))
    for name, value in _recorder(path.with_name("watchdog-rank")).items():
        os.environ.setdefault(name, value)
    threading.Thread(target=_answer, args=(file, path, ending), daemon=True).start()
    sys.excepthook = functools.partial(_failed, path, sys.excepthook)


def _recorder(dumps: Path) -> dict[str, str]:
    """torch's variables for its flight recorder and for NCCL's watchdog, which dumps it."""
    is_new = release(importlib.metadata.version("torch")) >= _FIRST_NAMED_FR
    found = {f"TORCH_{'FR_BUFFER' if is_new else 'NCCL_TRACE_BUFFER'}_SIZE": RECORDED_CALLS}
    if os.environ.get(variables.DEVICE) == "gpu":
        # By itself Megatron 0.19 has the dumps leave out what is done, and where calls were made.
        found |= {
            f"TORCH_{'FR_DUMP' if is_new else 'NCCL_DEBUG_INFO'}_TEMP_FILE": str(dumps),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_INCLUDE_ONLY_ACTIVE": "0",
            "TORCH_INCLUDE_STACK_TRACE": "1",
        }
    return found


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
    """The flight recorders' dump, with what gloo leaves out: the ranks of every group.

    gloo's calls and NCCL's are in recorders of their own, each with its own numbers of records.
    """
    if "torch.distributed" not in sys.modules:
        return {"entries": [], "dumped_ns": time.time_ns()}
    from torch._C import _distributed_c10d as c10d
    from torch.distributed import distributed_c10d

    # For its frames torch would import inductor, 9 s of a core, to ask it for code that it compiled.
    none = ModuleType(_COMPILER)
    is_ours = sys.modules.setdefault(_COMPILER, none) is none
    found: dict[str, Any] = pickle.loads(c10d._dump_fr_trace())  # noqa: S301 - this process made it
    if dump_nccl := getattr(c10d, "_dump_nccl_trace", None):  # Not in torch's builds for CPUs.
        of_nccl = pickle.loads(dump_nccl())  # noqa: S301
        entries = sorted(found["entries"] + of_nccl["entries"], key=itemgetter("time_created_ns"))
        found["entries"] = [{**entry, "record_id": at} for at, entry in enumerate(entries)]
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
