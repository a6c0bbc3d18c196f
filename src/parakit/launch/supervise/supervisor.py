"""Run torchrun for a launcher, so that no rank outlives either of them.

usage: python -m parakit.launch.supervise.supervisor FOLDER -- COMMAND…

The launcher holds the other end of this process's standard input. If the launcher dies, for whatever reason, this
process reads an end of file. Orphans of torchrun become children of this process (a child subreaper), so none is
lost. The kernel signals torchrun when this process dies. If the launcher is gone, this process writes the run's
final status.

COMMAND may start a container. If its client ends first, the container is left as it is: the launcher asks the
engine how the container ended, and ends it.
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
_PODMAN = "podman"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(folder: Path, command: Sequence[str]) -> int:
    """Run the command until it or the launcher ends, and end all its processes; return the exit code.

    The code is 128 + n if signal n ended the command. If the launcher has ended first, the run's final status
    is written to `folder`. A container is ended only in that case.
    """
    # torchrun would inherit SIG_IGN, but not these handlers. This process ends when its child has ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    started = time.monotonic()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=_prepare_child,  # noqa: PLW1509 - no threads here
    )
    launcher_lives = True
    while launcher_lives and child.poll() is None:
        launcher_lives = not _is_input_closed(POLL_SECONDS)
        _reap_orphans(child.pid)
    # Podman has no daemon: a container's monitor and ranks become children of this process when their client is
    # killed. If they were ended here, Podman would report a container that was killed, and the cause would be lost.
    if not launcher_lives or command[0] != _PODMAN:
        end_processes(lambda: psutil.Process().children(recursive=True))
    code = child.wait()
    if not launcher_lives:
        from parakit.cluster import CONTAINER_FILE, remove_container
        from parakit.launch.supervise.exit_status import (
            make_killed_launcher_status,
            write_final_status,
        )

        remove_container(folder / CONTAINER_FILE, command[0])
        write_final_status(folder, make_killed_launcher_status(folder), time.monotonic() - started)
    # Popen reports signal n as -n.
    return 128 - code if code < 0 else code


def _is_input_closed(seconds: float) -> bool:
    """Wait for an event on the standard input, at most `seconds`; return True if its other end was closed."""
    standard_input = sys.stdin.fileno()
    readable, _, _ = select.select([standard_input], [], [], seconds)
    # Reading at the end of a file gives no bytes.
    return bool(readable) and not os.read(standard_input, 1)


def _reap_orphans(child: int) -> None:
    """Reap the processes that have ended among those that this process has adopted; `child` is left to `Popen`.

    Podman's client waits as long as its container's monitor is a process, and a zombie is one.
    """
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == child:
            return
        os.waitpid(ended.si_pid, 0)


def _prepare_child() -> None:
    """Have the kernel end torchrun with this process, and have torchrun and its ranks ignore SIGUSR1.

    Slurm announces the end of a job's time by SIGUSR1 to all processes of a step. The launcher alone decides what
    to do about it. Without a handler the signal would end a rank.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _prctl(option: int, value: int) -> None:
    """Set an option of this process in the kernel.

    Raises:
        OSError: The kernel refuses the option.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


if __name__ == "__main__":
    folder_argument, _, *argv = sys.argv[1:]
    sys.exit(main(Path(folder_argument), argv))
