import json
import os
import subprocess
import sys
from typing import Any

import pytest

from megatron_patches.fused.names import NAMES
from tools.spec.files import ROOT

ALL = ",".join(name for name in NAMES if not name.startswith("attention_"))
SAME_ARITHMETIC = "cross_entropy,adamw,multi_tensor"
"""Patches that round where Megatron rounds; the others round a compiled function only at its end."""


ON_HOST = {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def trained(fused: str, precision: str) -> dict[str, Any]:
    command = (sys.executable, "-m", "tests.patches.fused.in_megatron", fused, precision)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ON_HOST},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    patched = {name.removeprefix("fused ") for name in found["applied"] if "fused " in name}
    assert patched == set(filter(None, fused.split(",")))
    return found


@pytest.mark.parametrize(
    ("fused", "precision", "tolerance"), [(ALL, "fp32", 3e-6), (SAME_ARITHMETIC, "bf16", 1e-6)]
)
def test_three_updates_of_a_gpt_are_those_of_megatron_alone(
    fused: str, precision: str, tolerance: float
) -> None:
    alone, patched = trained("", precision), trained(fused, precision)
    for figure in ("losses", "norms", "total"):
        assert patched[figure] == pytest.approx(alone[figure], rel=tolerance)
    assert alone["losses"][2] < alone["losses"][1] < alone["losses"][0]


@pytest.mark.slow
def test_in_bf16_the_other_patches_stay_within_its_rounding() -> None:
    alone, patched = trained("", "bf16"), trained(ALL, "bf16")
    eps = 2**-8
    assert patched["losses"] == pytest.approx(alone["losses"], rel=eps)
    assert patched["norms"][0] == pytest.approx(alone["norms"][0], rel=eps)
