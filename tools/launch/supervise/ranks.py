"""The processes of a run: torchrun and its ranks under a supervisor; all are ended, whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import psutil

from tools.cluster.container.docker import remove_container
from tools.launch.supervise import supervisor
from tools.launch.supervise.warm import WarmMegatron
from tools.records.io import lock
from tools.spec import variables
from tools.spec.files import ROOT

GRACE_SECONDS = 4.0
"""From SIGTERM to SIGKILL; both together stay well under the promised 10 s."""

_RANK_VARIABLE = "RANK"
_RANK = re.compile(r"rank(\d+)")
_SUPERVISOR = (sys.executable, "-m", "tools.launch.supervise.supervisor")


class RankProcesses:
    """torchrun with its ranks under a supervisor, in a session of their own, all output to one file."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        container: str | None = None,
        warm: WarmMegatron | None = None,
    ) -> None:
        self._container = container
        self._warm = warm
        self._log: BinaryIO = log.open("ab")
        # Every process of the run inherits this lock with its output, and the last one gives it back.
        _lock(self._log)
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        # Ranks write to the file themselves, so the log is whole even if the launcher is killed. The
        # session keeps a terminal's Ctrl-C from reaching the ranks before the launcher decides.
        self._supervisor = subprocess.Popen(
            (
                *_SUPERVISOR,
                str(log.parent.absolute()),
                container or supervisor.NO_CONTAINER,
                "--",
                *command,
            ),
            cwd=ROOT,
            env={
                **_without_rank(),
                "PYTHONUNBUFFERED": "1",
                **environment,
                variables.RUN_MARK: self._mark,
            },
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

    def by_rank(self) -> dict[int, psutil.Process]:
        """The rank processes that live now, by rank."""
        found: dict[int, psutil.Process] = {}
        for process in self._forked():
            # Its environment is that of the process it was forked from; its name says what it is.
            if named := _RANK.fullmatch(_name(process)):
                found.setdefault(int(named[1]), process)
        for process in self._descendants():
            rank = _environment(process).get(_RANK_VARIABLE)
            if rank is not None:
                found.setdefault(int(rank), process)
        return found

    def stop(self) -> None:
        """End every process of the run: SIGTERM, then SIGKILL, then the container if there is one.

        Docker's client passes SIGTERM on; SIGKILL ends the client alone, so the container is removed.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self._family() if alive(process)]
            for process in running:
                _signal(process, number)
            _wait_until_gone(running, GRACE_SECONDS)
        self._supervisor.wait()
        if self._container is not None:
            remove_container(self._container)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._supervisor.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _family(self) -> list[psutil.Process]:
        """Every process that was started for this run, orphans too, by what they all inherit."""
        # The supervisor by its number: while the kernel starts a program, its environment is empty.
        supervisor = self._supervisor.pid if self._supervisor.poll() is None else None
        started = (p for p in psutil.process_iter() if p.pid == supervisor or self._is_marked(p))
        return [*started, *self._forked()]

    def _is_marked(self, process: psutil.Process) -> bool:
        return _environment(process).get(variables.RUN_MARK) == self._mark

    def _forked(self) -> list[psutil.Process]:
        """Ranks of a warm process, and their leader, which ends them when the supervisor has ended."""
        if self._warm is None:
            return []
        try:
            return psutil.Process(self._warm.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _without_rank() -> dict[str, str]:
    """This process's variables without what ranks are known by, which clusters may set here too."""
    return {name: value for name, value in os.environ.items() if name != _RANK_VARIABLE}


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def alive(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie, which an init that does not reap leaves, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _lock(log: BinaryIO) -> None:
    """Lock the log; who looks whether the run is on (`is_running`) holds it for an instant."""
    for _ in range(20):
        try:
            return lock(log)
        except BlockingIOError:
            time.sleep(0.05)
    return lock(log)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _wait_until_gone(processes: Sequence[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(alive(process) for process in processes):
        time.sleep(0.05)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
