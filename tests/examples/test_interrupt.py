import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.examples.runs import Run
from tests.patience import OF_A_RUN, until
from tools.cli.main import from_make
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
            (sys.executable, "-m", "tools.cli", "train-dp2-gpt2-tiny-2cpu"),
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
    if number is signal.SIGTERM:  # As `make stop` sends it.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tools.launch.stop.STOP_SECONDS", OF_A_RUN)
            assert from_make("stop", [str(folder)]) == 0
    else:
        launcher.send_signal(number)
    return Stopped(folder, launcher.wait(OF_A_RUN), ranks)


@pytest.mark.parametrize("number", MOMENTS)
def test_a_run_told_to_stop_ends_all_ranks(
    number: signal.Signals, stopped: dict[signal.Signals, Stopped]
) -> None:
    run = stopped[number]
    assert run.exit_code == 130
    assert len(run.ranks) >= 3
    assert not any(alive(rank) for rank in run.ranks)
    assert records.read_status(run.folder).status is Status.INTERRUPTED


def wait_for_log(runs: Path, text: str) -> Path:
    def found() -> Path | None:
        logs = runs.glob("2*/log.txt")
        return next((log.parent for log in logs if text in log.read_text(errors="replace")), None)

    folder = until(found, f"'{text}' did not appear in a log", OF_A_RUN)
    assert folder is not None
    return folder
