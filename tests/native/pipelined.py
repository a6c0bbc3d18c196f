"""Scenario of three ranks that train with every schedule, in a process that loads torch."""

import subprocess
import sys
from pathlib import Path

from parakit.config.files import ROOT
from tests.patience import OF_A_RUN

STAGES = 3


def pipelines(runs: Path, *_: object) -> str:
    """Return the folder with `rankN.pt`, the results of each rank."""
    folder = runs / "pipelines"
    folder.mkdir()
    command = (sys.executable, "-m", "tests.native.pipeline_rank", str(folder))
    subprocess.run(command, cwd=ROOT, check=True, timeout=3 * OF_A_RUN)
    return str(folder)
