import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.examples.conftest import Run, Trainer
from tools.launch.supervise.ranks import alive
from tools.records import run as records
from tools.records.run import Status
from tools.spec.files import ROOT

MOMENTS = {signal.SIGINT: "iteration        3/", signal.SIGTERM: "initializing torch distributed"}


@pytest.mark.parametrize("number", MOMENTS)
def test_a_run_told_to_stop_ends_all_ranks_within_ten_seconds(
    number: signal.Signals, six: dict[str, Run], train: Trainer, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / ".start").symlink_to(train.options.runs / ".start")
    environment = {**os.environ, "ITERS": "400", "DATA": str(train.options.data), "RUNS": str(runs)}
    command = (sys.executable, "-m", "tools.launch", "target", "train-dp2-gpt2-tiny-2cpu")
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    folder = wait_for_log(runs, MOMENTS[number])
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    asked = time.monotonic()
    launcher.send_signal(number)
    assert launcher.wait(timeout=10) == 130
    assert time.monotonic() - asked < 10
    assert len(ranks) >= 3
    assert not any(alive(rank) for rank in ranks)
    assert records.read_status(folder).status is Status.INTERRUPTED


def wait_for_log(runs: Path, text: str) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for log in runs.glob("2*/log.txt"):
            if text in log.read_text(errors="replace"):
                return log.parent
        time.sleep(0.05)
    raise AssertionError(f"'{text}' did not appear in a log")
