"""Between the launcher and torchrun: when either is gone, so are all ranks.

python -m parakit.launch.supervise.supervisor FOLDER -- COMMAND…

The launcher holds the other end of this process's standard input, so its death, of whatever, is an end
of file here. Orphans of torchrun become children of this process (a child subreaper), so none is lost.
The kernel signals torchrun when this process dies. What the launcher can no longer write, the status
of the run, is written here.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from parakit.launch.supervise.interruption import end_processes

POLL_SECONDS = 0.2

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(folder: Path, command: Sequence[str]) -> int:
    """Run the command to its end, or to the launcher's; 128 + n if a signal ended it."""
    # Handlers, not SIG_IGN: those would be inherited. This process goes when its child has gone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    started = time.monotonic()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509 - no threads here
    )
    launcher_lives = True
    while launcher_lives and child.poll() is None:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_SECONDS)
        launcher_lives = not readable or bool(os.read(sys.stdin.fileno(), 1))
    end_processes(lambda: psutil.Process().children(recursive=True))
    code = child.wait()
    if not launcher_lives:
        from parakit.cluster import CONTAINER_FILE, remove_container
        from parakit.launch.supervise.exit_status import (
            make_killed_launcher_status,
            write_final_status,
        )

        remove_container(folder / CONTAINER_FILE)
        write_final_status(folder, make_killed_launcher_status(folder), time.monotonic() - started)
    return 128 - code if code < 0 else code


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


if __name__ == "__main__":
    place, _, *argv = sys.argv[1:]
    sys.exit(main(Path(place), argv))
