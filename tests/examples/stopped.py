"""Two runs that start at the same time, and are asked to stop one after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tools.launch.__main__ import main
from tools.launch.supervise.ranks import alive
from tools.spec.files import ROOT

MOMENTS = {signal.SIGTERM: "initializing torch distributed", signal.SIGINT: "iteration        3/"}
"""What is asked, and the line after which; the earlier one first."""


@dataclass(frozen=True)
class Stopped:
    """A run after it was asked to stop."""

    folder: str
    exit_code: int
    seconds: float
    """From the request to the end of the launcher and of everything that it started."""
    processes: int
    """That the launcher had started."""


def stopped(runs: Path, data: Path) -> dict[str, dict[str, Any]]:
    """`Stopped` by the signal's name."""
    folders = {number: runs / f"stopped-{number.name}" for number in MOMENTS}
    launchers = {}
    for number, folder in folders.items():
        folder.mkdir()
        (folder / ".start").symlink_to(runs / ".start")
        settings = {"ITERS": "400", "DATA": str(data), "RUNS": str(folder)}
        launchers[number] = subprocess.Popen(
            (sys.executable, "-m", "tools.launch", "target", "train-dp2-gpt2-tiny-2cpu"),
            cwd=ROOT,
            env={**os.environ, **settings},
            stdout=subprocess.DEVNULL,
        )
    try:
        return {
            number.name: asdict(
                _stop(launchers[number], _wait_for_log(folders[number], line), number)
            )
            for number, line in MOMENTS.items()
        }
    finally:
        for launcher in launchers.values():
            launcher.terminate()
            launcher.wait()


def _stop(launcher: subprocess.Popen[bytes], folder: Path, number: signal.Signals) -> Stopped:
    processes = psutil.Process(launcher.pid).children(recursive=True)
    asked = time.monotonic()
    if number is signal.SIGTERM:  # As `make stop` sends it.
        assert main(("stop", str(folder))) == 0
    else:
        launcher.send_signal(number)
    exit_code = launcher.wait(timeout=30)
    while any(alive(process) for process in processes):
        assert time.monotonic() < asked + 30, "processes are left"
        time.sleep(0.05)
    return Stopped(str(folder), exit_code, time.monotonic() - asked, len(processes))


def _wait_for_log(runs: Path, text: str) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for log in runs.glob("2*/log.txt"):
            if text in log.read_text(errors="replace"):
                return log.parent
        time.sleep(0.05)
    raise AssertionError(f"'{text}' did not appear in a log")
