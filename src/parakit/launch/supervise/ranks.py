"""The processes of a run: torchrun and its ranks under a supervisor; all are ended, whatever happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import psutil

from parakit.artifacts.io import lock_file
from parakit.cluster import (
    CONTAINER_FILE,
    ContainerEnd,
    add_container_id_file,
    query_container_end,
    read_container_id,
    remove_container,
)
from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.launch.supervise.interruption import end_processes
from parakit.launch.supervise.warm import WarmMegatron

_RANK_VARIABLE = "RANK"
_RANK = re.compile(r"rank(\d+)")
_SUPERVISOR = (sys.executable, "-m", "parakit.launch.supervise.supervisor")


class RankProcesses:
    """torchrun with its ranks under a supervisor, in a session of their own, all output to one file."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        in_container: bool = False,
        warm: WarmMegatron | None = None,
    ) -> None:
        """Start them; `command` is a `docker run` where they are in a container.

        Raises:
            LaunchError: A container of an attempt before this one cannot be removed.
        """
        self._container = log.with_name(CONTAINER_FILE) if in_container else None
        if self._container is not None:
            left = read_container_id(self._container)
            if left is not None and not remove_container(self._container):
                raise LaunchError(
                    f"{relative_to_root(log.parent)} has a container of before, which may train, and Docker "
                    "does not remove it; start the engine, or end it with 'docker rm --force "
                    f"{left[:12]}'."
                )
            command = add_container_id_file(command, self._container.absolute())
        self._began = time.time()
        self._warm = warm
        self._log: BinaryIO = log.open("ab")
        # Every process of the run inherits this lock with its output, and the last one gives it back.
        _lock(self._log)
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        # Without what ranks are known by, which clusters may set here too.
        own = {name: value for name, value in os.environ.items() if name != _RANK_VARIABLE}
        # Ranks write to the file themselves, so the log is whole even if the launcher is killed. The
        # session keeps a terminal's Ctrl-C from reaching the ranks before the launcher decides.
        self._supervisor = subprocess.Popen(
            (*_SUPERVISOR, str(log.parent.absolute()), "--", *command),
            cwd=ROOT,
            env={**own, "PYTHONUNBUFFERED": "1", **environment, variables.RUN_MARK: self._mark},
            # Never written to: its end shows the supervisor that this process is gone.
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        self._log.close()

    def exit_code(self) -> int | None:
        """torchrun's exit code, 128 + n if signal n ended it; None while anything runs."""
        return self._supervisor.poll()

    def find_by_rank(self) -> dict[int, psutil.Process]:
        """The rank processes that live now, by rank."""
        found: dict[int, psutil.Process] = {}
        for process in self._forked():
            # Its environment is that of the process it was forked from; its name says what it is.
            with suppress(psutil.Error):
                if named := _RANK.fullmatch(process.name()):
                    found.setdefault(int(named[1]), process)
        ranks = _children(self._supervisor.pid) if self._container is None else self._marked()
        for process in ranks:
            rank = _environment(process).get(_RANK_VARIABLE)
            if rank is not None:
                found.setdefault(int(rank), process)
        return found

    def stop(self) -> None:
        """End every process of the run: SIGTERM, then SIGKILL, then the container if there is one.

        Ranks in a container are processes of this machine too, unless its engine is elsewhere; where
        they are not, Docker's client passes SIGTERM on, and what SIGKILL leaves goes with the container.
        """
        end_processes(self._family)
        self._supervisor.wait()
        if self._container is not None:
            remove_container(self._container)

    def read_container_end(self) -> ContainerEnd | None:
        """What the engine says of the container, once its client has ended; None without one."""
        container = read_container_id(self._container) if self._container else None
        return query_container_end(container, self._began) if container else None

    def _family(self) -> list[psutil.Process]:
        """Every process that was started for this run, orphans too, by what they all inherit."""
        # The supervisor by its number: while the kernel starts a program, its environment is empty.
        supervisor = self._supervisor.pid if self._supervisor.poll() is None else None
        own = (process for process in psutil.process_iter() if process.pid == supervisor)
        return [*own, *self._marked(), *self._forked()]

    def _marked(self) -> list[psutil.Process]:
        """Those that have inherited this run's mark, in a container too."""
        return [
            process
            for process in psutil.process_iter()
            if _environment(process).get(variables.RUN_MARK) == self._mark
        ]

    def _forked(self) -> list[psutil.Process]:
        """Ranks of a warm process, and their leader, which ends them when the supervisor has ended."""
        return _children(self._warm.pid) if self._warm else []


def _children(process: int) -> list[psutil.Process]:
    """All below it, by its number."""
    try:
        return psutil.Process(process).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _lock(log: BinaryIO) -> None:
    """Lock the log; who looks whether the run is on (`is_running`) holds it for an instant."""
    for _ in range(20):
        try:
            return lock_file(log)
        except BlockingIOError:
            time.sleep(0.05)
    return lock_file(log)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
