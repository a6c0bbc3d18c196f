"""Who writes a run folder: advisory locks, which some file systems do not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.launch.cluster.nodes import Nodes
from tools.launch.errors import LaunchError
from tools.records import run as records
from tools.records.io import lock

LOCK_FILE = ".lock"


def is_running(log: Path) -> bool:
    """Whether a process of the run that writes this log still lives."""
    try:
        with log.open("rb") as file:
            lock(file, shared=True)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


@contextmanager
def only_attempt(run: Path | None, nodes: Nodes | None) -> Iterator[None]:
    """Hold a run folder, from the choice of a checkpoint in it to the end of the attempt.

    Nobody holds a folder that is still to be made, and of several nodes the first does.

    Raises:
        LaunchError: Another launcher holds it, or a rank of the run still lives.
    """
    if run is None or (nodes is not None and nodes.rank > 0):
        yield
        return
    with (run / LOCK_FILE).open("ab") as file:
        try:
            lock(file)
        except BlockingIOError:
            raise LaunchError(_still(run)) from None
        if is_running(run / records.LOG_FILE):
            raise LaunchError(_still(run))
        yield


def _still(run: Path) -> str:
    return f"{run} is still running; stop it before it is resumed."
