"""Three ranks that train by every schedule, forked where torch is loaded: not here."""

import subprocess
import sys
from pathlib import Path

from parakit.config.files import ROOT
from tests.patience import OF_A_RUN

STAGES = 3


def pipelines(runs: Path, *_: object) -> str:
    """The folder with `rankN.pt`: what each rank found."""
    folder = runs / "pipelines"
    folder.mkdir()
    command = (sys.executable, "-m", "tests.native.pipeline_rank", str(folder))
    subprocess.run(command, cwd=ROOT, check=True, timeout=3 * OF_A_RUN)
    return str(folder)
