import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.examples.runs import Run
from tools.launch.__main__ import main
from tools.launch.supervise.ranks import alive
from tools.records import run as records
from tools.records.run import Status
from tools.spec.files import ROOT

MOMENTS = {signal.SIGTERM: "initializing torch distributed", signal.SIGINT: "iteration        3/"}
"""What is asked, and the line after which; the earlier one first."""


@dataclass(frozen=True)
class Stopped:
    """A run after it was asked to stop."""

    folder: Path
    exit_code: int
    seconds: float
    """From the request to the launcher's end."""
    ranks: list[psutil.Process]


@pytest.fixture(scope="module")
def stopped(
    six: dict[str, Run],
    sample_prefix: Path,
    starting_weights: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[signal.Signals, Stopped]]:
    """Two runs that start at the same time, and are asked one after the other."""
    runs = {number: tmp_path_factory.mktemp("runs") for number in MOMENTS}
    launchers = {}
    for number, folder in runs.items():
        (folder / ".start").symlink_to(starting_weights)
        settings = {"ITERS": "400", "DATA": str(sample_prefix), "RUNS": str(folder)}
        launchers[number] = subprocess.Popen(
            (sys.executable, "-m", "tools.launch", "target", "train-dp2-gpt2-tiny-2cpu"),
            cwd=ROOT,
            env={**os.environ, **settings},
            stdout=subprocess.DEVNULL,
        )
    try:
        yield {
            number: stop(launchers[number], wait_for_log(runs[number], line), number)
            for number, line in MOMENTS.items()
        }
    finally:
        for launcher in launchers.values():
            launcher.terminate()
            launcher.wait()


def stop(launcher: subprocess.Popen[bytes], folder: Path, number: signal.Signals) -> Stopped:
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    asked = time.monotonic()
    if number is signal.SIGTERM:  # As `make stop` sends it.
        assert main(("stop", str(folder))) == 0
    else:
        launcher.send_signal(number)
    exit_code = launcher.wait(timeout=30)
    return Stopped(folder, exit_code, time.monotonic() - asked, ranks)


@pytest.mark.parametrize("number", MOMENTS)
def test_a_run_told_to_stop_ends_all_ranks_within_ten_seconds(
    number: signal.Signals, stopped: dict[signal.Signals, Stopped]
) -> None:
    run = stopped[number]
    assert run.exit_code == 130
    assert run.seconds < 10
    assert len(run.ranks) >= 3
    assert not any(alive(rank) for rank in run.ranks)
    assert records.read_status(run.folder).status is Status.INTERRUPTED


def wait_for_log(runs: Path, text: str) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for log in runs.glob("2*/log.txt"):
            if text in log.read_text(errors="replace"):
                return log.parent
        time.sleep(0.05)
    raise AssertionError(f"'{text}' did not appear in a log")
