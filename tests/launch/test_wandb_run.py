"""One real run that is logged to W&B offline: what the client gets, and what no file holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parakit.config.files import ROOT

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.slow
def test_an_offline_run_holds_the_training_metrics_and_no_key(
    sample_prefix: Path, tmp_path: Path
) -> None:
    settings = {
        "WANDB": "1",
        "WANDB_MODE": "offline",
        "WANDB_PROJECT": "mine",
        "WANDB_API_KEY": KEY,
    }
    settings |= {
        "ITERS": "3",
        "DATA": str(sample_prefix),
        "RUNS": str(tmp_path),
        "SHARED_START": "0",
    }
    answer = subprocess.run(
        (sys.executable, "-m", "parakit", "train-baseline-gpt2-tiny-1cpu"),
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (folder,) = tmp_path.glob("2*")
    (logged,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = logged.read_bytes()
    for expected in (b"lm loss", b"mine", folder.name.encode()):
        assert expected in content
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any("tfevents" in path.name for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
