"""Three ranks that train by every schedule, without loading torch here."""

import subprocess
import sys
from pathlib import Path

from tools.spec.files import ROOT

STAGES = 3


def pipelines(runs: Path, data: Path) -> str:
    """The folder with `rankN.pt`: what each rank found."""
    folder = runs / "pipelines"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.native.pipeline_rank", str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in range(STAGES)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * STAGES
    return str(folder)
