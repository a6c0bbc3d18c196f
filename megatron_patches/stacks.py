"""A rank's Python stacks on request: SIGUSR1 writes them to a file, even while it waits in C code."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

from tools.spec import variables


def dump_stacks_on_request() -> None:
    """From now on SIGUSR1 adds the stacks of all threads to `rank<N>.txt` in the folder."""
    folder = os.environ.get(variables.STACKS)
    if folder is None:
        return
    path = Path(folder) / f"rank{os.environ.get('RANK', '0')}.txt"
    # Stays open for as long as the process lives: the handler may not open files.
    file = path.open("a")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
