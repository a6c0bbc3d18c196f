"""Verdicts against what Megatron does with its own checkpoint at two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.checkpoint.checks import loading, problems_of
from tools.checkpoint.contents import read_contents

IGNORED = "vs (2, 1) from checkpoint): RNG state will be ignored"


def made(target: str, runs: Path, **variables: str) -> str:
    """What a target prints and logs; it must end well."""
    environment = os.environ | variables | {"RUNS": str(runs), "PYTHONPATH": "."}
    done = subprocess.run(
        (sys.executable, "-m", "tools.cli", target),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return max(runs.glob("2*/log.txt"), key=lambda log: log.stat().st_mtime).read_text()


@pytest.mark.slow
def test_megatron_keeps_or_ignores_what_the_verdict_says(tmp_path: Path) -> None:
    made("train-tp2-gpt2-tiny-2cpu", tmp_path, ITERS="4", SAVE_EVERY="4")
    run = next(tmp_path.glob("2*"))
    contents = read_contents(run / "checkpoints")
    assert problems_of(contents, reads_pieces=True) == ()
    assert contents.states == ("optimizer", "scheduler", "random")
    for strategy, iterations in (("pp2", "5"), ("dp2", "6"), ("tp2", "7")):
        log = made("resume", tmp_path, RUN=str(run), STRATEGY=strategy, ITERS=iterations)
        verdict = loading(contents, strategy).verdict
        assert verdict == ("loads without random states" if IGNORED in log else "loads"), strategy
