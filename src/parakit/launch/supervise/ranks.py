"""Start a run's torchrun and ranks under a supervisor, find them by rank, and end every one of them."""

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
_POLL_SECONDS = 0.1
_SUPERVISOR = (sys.executable, "-m", "parakit.launch.supervise.supervisor")


class RankProcesses:
    """torchrun with its ranks under a supervisor, in a session of their own, with all output in one log."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        engine: str | None = None,
        warm: WarmMegatron | None = None,
    ) -> None:
        """Start the processes.

        Args:
            command: torchrun's command, or the `docker run` or `podman run` that contains it.
            environment: Variables besides those of this process.
            log: The file to which all output is appended.
            engine: docker or podman if `command` starts a container; None if all processes are descendants of it.
            warm: The process that forks the ranks, if they are not started by `command`.

        Raises:
            LaunchError: The container of an earlier attempt cannot be removed.
        """
        self._engine = engine or ""
        self._container = log.with_name(CONTAINER_FILE) if engine else None
        if self._container is not None:
            _remove_earlier_container(self._container, self._engine)
            command = add_container_id_file(command, self._container.absolute())
        self._began = time.time()
        self._warm = warm
        self._log: BinaryIO = log.open("ab")
        # Every process of the run inherits this lock with its output, so it is held until the last one ends.
        _lock_log(self._log)
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        marked_environment = {**environment, variables.RUN_MARK: self._mark}
        self._supervisor = _start_supervisor(
            log.parent.absolute(), command, marked_environment, self._log
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        self._log.close()

    def exit_code(self) -> int | None:
        """Return torchrun's exit code, or 128 + n if signal n ended it; None while anything runs."""
        return self._supervisor.poll()

    def find_by_rank(self) -> dict[int, psutil.Process]:
        """Return the rank processes that live now, by rank."""
        process_by_rank: dict[int, psutil.Process] = {}
        for process in self._find_forked():
            # A forked process has the environment of its parent. Its name holds its rank instead.
            with suppress(psutil.Error):
                match = _RANK.fullmatch(process.name())
                if match is not None:
                    process_by_rank.setdefault(int(match[1]), process)
        # The engine starts a container's processes, so they are no descendants of the supervisor.
        is_container = self._container is not None
        processes = self._find_marked() if is_container else _find_descendants(self._supervisor.pid)
        for process in processes:
            rank = _read_environment(process).get(_RANK_VARIABLE)
            if rank is not None:
                process_by_rank.setdefault(int(rank), process)
        return process_by_rank

    def let_save(self, grace_seconds: float) -> None:
        """Ask the ranks to save and end, and wait until all processes have ended, at most `grace_seconds`.

        SIGTERM goes to the ranks alone, because torchrun would kill them 30 s after a SIGTERM of its own.
        """
        for process in self.find_by_rank().values():
            with suppress(psutil.Error):
                process.terminate()
        deadline = time.monotonic() + grace_seconds
        while self._supervisor.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End every process of the run: SIGTERM, then SIGKILL, then the container if there is one.

        The ranks of a container are processes of this machine too, unless Docker's engine is on another one. Then
        Docker's client passes SIGTERM on, and SIGKILL is replaced by the removal of the container.
        """
        end_processes(self._find_all)
        self._supervisor.wait()
        if self._container is not None:
            remove_container(self._container, self._engine)

    def read_container_end(self) -> ContainerEnd | None:
        """Return what the engine reports of the container after its client has ended; None without a container."""
        container = read_container_id(self._container) if self._container else None
        if container is None:
            return None
        return query_container_end(container, self._began, self._engine)

    def _find_all(self) -> list[psutil.Process]:
        """Return every process that was started for this run, including orphans."""
        # The supervisor is found by its process id, because a process has no environment while the kernel
        # starts its program.
        supervisor = self._supervisor.pid if self._supervisor.poll() is None else None
        supervisors = (process for process in psutil.process_iter() if process.pid == supervisor)
        return [*supervisors, *self._find_marked(), *self._find_forked()]

    def _find_marked(self) -> list[psutil.Process]:
        """Return the processes that have inherited this run's mark, in a container too."""
        return [
            process
            for process in psutil.process_iter()
            if _read_environment(process).get(variables.RUN_MARK) == self._mark
        ]

    def _find_forked(self) -> list[psutil.Process]:
        """Return the ranks of a warm process, and their leader, which ends them after the supervisor has ended."""
        return _find_descendants(self._warm.pid) if self._warm else []


def _remove_earlier_container(container_file: Path, engine: str) -> None:
    """Remove the container that an earlier attempt has left in the same folder, if there is one.

    Raises:
        LaunchError: The engine does not remove the container.
    """
    container = read_container_id(container_file)
    if container is not None and not remove_container(container_file, engine):
        name = engine.capitalize()
        raise LaunchError(
            f"The container of an earlier attempt in {relative_to_root(container_file.parent)} may still train, "
            f"and {name} does not remove it; start {name}'s engine, or end the container with "
            f"'{engine} rm --force {container[:12]}'."
        )


def _start_supervisor(
    folder: Path, command: Sequence[str], environment: Mapping[str, str], log: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start the supervisor of a command in a session of its own, with all output in `log`; return its process."""
    # Ranks are found by the variable RANK. A cluster may have set it for this process too.
    inherited = {name: value for name, value in os.environ.items() if name != _RANK_VARIABLE}
    # Ranks write to the file directly, so the log is complete even if the launcher is killed. Their own
    # session keeps a terminal's Ctrl-C from them; the launcher decides what to do about it.
    return subprocess.Popen(
        (*_SUPERVISOR, str(folder), "--", *command),
        cwd=ROOT,
        env={**inherited, "PYTHONUNBUFFERED": "1", **environment},
        # Nothing is written to this pipe. When it closes, the supervisor knows that the launcher is gone.
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _find_descendants(process: int) -> list[psutil.Process]:
    """Return all processes below the one with this process id; empty if it has ended."""
    try:
        return psutil.Process(process).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _lock_log(log: BinaryIO) -> None:
    """Lock the log, and try again for a second: a check whether the run is active (`is_running`) holds the lock for
    an instant.
    """
    for _ in range(20):
        try:
            return lock_file(log)
        except BlockingIOError:
            time.sleep(0.05)
    return lock_file(log)


def _read_environment(process: psutil.Process) -> dict[str, str]:
    """Return a process's environment; empty if it has ended or belongs to another user."""
    try:
        return process.environ()
    except psutil.Error:
        return {}
