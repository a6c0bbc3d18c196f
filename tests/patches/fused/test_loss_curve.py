"""200 updates of gpt2-tiny on the CPU: the effect of patches compared with that of another seed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parakit.config.files import ROOT

FIGURE = re.compile(r"(\d[\d.e-]*) with (FUSED|SEED)=")


def distances(folder: Path, data: Path, **variables: str) -> dict[str, float]:
    done = subprocess.run(
        (sys.executable, "-m", "parakit", "bench", "loss-curve"),
        cwd=ROOT,
        env={**os.environ, "DATA": str(data), "RUNS": str(folder), "SEED": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within the scatter of seeds" in done.stdout
    return {name: float(figure) for figure, name in FIGURE.findall(done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "share"), [("", 0.02), ("--bf16", 0.1)])
def test_patches_change_the_loss_curve_much_less_than_another_seed(
    extra: str, share: float, tmp_path: Path, sample_prefix: Path
) -> None:
    distances_by_variable = distances(tmp_path / "runs", sample_prefix, EXTRA=extra)
    # On the CPU no patch draws random numbers, so the dropout masks are those of Megatron alone.
    assert distances_by_variable["FUSED"] < share * distances_by_variable["SEED"]
