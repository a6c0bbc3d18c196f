"""Runs that are stopped: by `make stop` during start-up, and by Ctrl-C during training."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from parakit.config.files import ROOT
from parakit.experiments.verify.verifier import ForkedRanks
from parakit.launch.stop import stop_run
from parakit.launch.supervise.interruption import is_alive
from tests.examples.forked_launcher import forked
from tests.patience import OF_A_RUN, until
from tests.small import SMALL

MOMENTS = {signal.SIGTERM: "initializing torch distributed", signal.SIGINT: "iteration        3/"}
"""Signals, and the log line after which each is sent."""


@dataclass(frozen=True)
class Stopped:
    """A run after it was asked to stop."""

    folder: str
    exit_code: int
    ranks: int
    """Number of processes of the run, including the one that forked the ranks."""
    survivors: int
    """Processes that still live."""


def stopped(runs: Path, data: Path, ranks: ForkedRanks) -> dict[str, Any]:
    """Return `Stopped` as dictionaries, by the number of the signal."""
    return {str(int(number)): asdict(_stop(number, runs, data, ranks)) for number in MOMENTS}


def _stop(number: signal.Signals, runs: Path, data: Path, ranks: ForkedRanks) -> Stopped:
    run_folder = runs / f"stopped-{number.name}"
    run_folder.mkdir()
    (run_folder / ".start").symlink_to(runs / ".start")
    settings = {
        "ITERS": "400",
        "DATA": str(data),
        "RUNS": str(run_folder),
        "EXTRA": " ".join(SMALL),
    }
    launcher = subprocess.Popen(
        (*forked(ranks), "run", "dp2", "gpt2-tiny", "2cpu"),
        cwd=ROOT,
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
    )
    try:
        folder = _wait_for_log(launcher, run_folder, MOMENTS[number])
        started = psutil.Process(ranks.warm.pid).children(recursive=True)
        if number is signal.SIGTERM:  # The signal is sent by the code of `make stop`.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("parakit.launch.stop.STOP_SECONDS", OF_A_RUN)
                assert stop_run(folder, Console(quiet=True)) == 0
        else:
            launcher.send_signal(number)
        code = launcher.wait(OF_A_RUN)
        return Stopped(str(folder), code, len(started), sum(map(is_alive, started)))
    finally:
        launcher.terminate()
        launcher.wait()


def _wait_for_log(launcher: subprocess.Popen[bytes], runs: Path, text: str) -> Path:
    def found() -> Path | None:
        assert launcher.poll() is None, f"the launcher ended with {launcher.returncode}"
        logs = runs.glob("2*/log.txt")
        return next((log.parent for log in logs if text in log.read_text(errors="replace")), None)

    folder = until(found, f"'{text}' did not appear in a log", OF_A_RUN)
    assert folder is not None
    return folder
