import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from megatron_patches.fusions import NAMES
from tools.spec.files import ROOT

ALL = ",".join(name for name in NAMES if not name.startswith("attention_"))
SAME_ARITHMETIC = "cross_entropy,adamw,multi_tensor"
"""Patches that round where Megatron rounds; the others round a compiled function only at its end."""


ON_HOST = {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


Figures = dict[str, Any]
Trained = Callable[[str, str], "Future[Figures]"]


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    """What a training prints, each made once and two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield functools.cache(lambda fused, precision: pool.submit(train, fused, precision))


def train(fused: str, precision: str) -> Figures:
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
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    patched = {name.removeprefix("fused ") for name in found["applied"] if "fused " in name}
    assert patched == set(filter(None, fused.split(",")))
    return found


@pytest.mark.parametrize(
    ("fused", "precision", "tolerance"), [(ALL, "fp32", 3e-6), (SAME_ARITHMETIC, "bf16", 1e-6)]
)
def test_three_updates_of_a_gpt_are_those_of_megatron_alone(
    trained: Trained, fused: str, precision: str, tolerance: float
) -> None:
    both = [trained("", precision), trained(fused, precision)]
    alone, patched = (run.result() for run in both)
    for figure in ("losses", "norms", "total"):
        assert patched[figure] == pytest.approx(alone[figure], rel=tolerance)
    assert alone["losses"][2] < alone["losses"][1] < alone["losses"][0]


@pytest.mark.slow
def test_in_bf16_the_other_patches_stay_within_its_rounding(trained: Trained) -> None:
    both = [trained("", "bf16"), trained(ALL, "bf16")]
    alone, patched = (run.result() for run in both)
    eps = 2**-8
    assert patched["losses"] == pytest.approx(alone["losses"], rel=eps)
    assert patched["norms"][0] == pytest.approx(alone["norms"][0], rel=eps)
