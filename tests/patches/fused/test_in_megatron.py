import json
import os
import subprocess
import sys
from typing import Any

import pytest

from megatron_patches.fusions import NAMES
from tools.spec.files import ROOT

ALL = ",".join(name for name in NAMES if not name.startswith("attention_"))
SAME_ARITHMETIC = "cross_entropy,adamw,multi_tensor"
"""Patches that round where Megatron rounds; the others round a compiled function only at its end."""


ON_HOST = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


Figures = dict[str, Any]
PRECISIONS = {"": ("fp32", "bf16"), ALL: ("fp32", "bf16"), SAME_ARITHMETIC: ("bf16",)}
"""Of the patches, the precisions that one process trains in."""


@pytest.fixture(scope="module")
def updates() -> dict[str, Figures]:
    """What each set of patches gives, in processes forked from one."""
    done = subprocess.run(
        (sys.executable, "-m", "tests.patches.fused.in_megatron", json.dumps(PRECISIONS)),
        cwd=ROOT,
        env=os.environ | ON_HOST,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Figures] = json.loads(done.stdout.splitlines()[-1])
    for fused, figures in found.items():
        patched = {name.removeprefix("fused ") for name in figures["applied"] if "fused " in name}
        assert patched == set(filter(None, fused.split(",")))
    return found


@pytest.mark.parametrize(
    ("fused", "precision", "tolerance"), [(ALL, "fp32", 3e-6), (SAME_ARITHMETIC, "bf16", 1e-6)]
)
def test_three_updates_of_a_gpt_are_those_of_megatron_alone(
    updates: dict[str, Figures], fused: str, precision: str, tolerance: float
) -> None:
    alone, patched = updates[""][precision], updates[fused][precision]
    for figure in ("losses", "norms", "total"):
        assert patched[figure] == pytest.approx(alone[figure], rel=tolerance)
    assert alone["losses"][2] < alone["losses"][1] < alone["losses"][0]


def test_in_bf16_the_other_patches_stay_within_its_rounding(updates: dict[str, Figures]) -> None:
    alone, patched = updates[""]["bf16"], updates[ALL]["bf16"]
    eps = 2**-8
    assert patched["losses"] == pytest.approx(alone["losses"], rel=eps)
    assert patched["norms"][0] == pytest.approx(alone["norms"][0], rel=eps)


def test_megatron_alone_loads_no_compiler_and_a_fused_patch_may_use_it(
    updates: dict[str, Figures],
) -> None:
    assert updates[""]["compiler"] is False
    assert [fused for fused in updates if "no_dynamo" in updates[fused]["applied"]] == [""]
