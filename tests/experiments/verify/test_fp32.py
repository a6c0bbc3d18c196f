"""A verification that holds in bf16 is repeated in fp32, where a small error is above the tolerance."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parakit.config.files import ROOT

SMALL_ERROR = """
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import RowParallelLinear

forward = RowParallelLinear.forward


def forward_with_small_error(self, input_):
    output, bias = forward(self, input_)
    is_split = parallel_state.get_tensor_model_parallel_world_size() > 1
    return output * (1.0005 if is_split else 1.0), bias


RowParallelLinear.forward = forward_with_small_error
"""


@pytest.mark.ranks
def test_an_error_below_the_rounding_of_bf16_is_found_in_fp32(
    tmp_path: Path, sample_prefix: Path, starting_weights: Path
) -> None:
    (tmp_path / ".start").symlink_to(starting_weights)
    patch = tmp_path / "small_error.py"
    patch.write_text(SMALL_ERROR)
    variables = {
        "RUNS": str(tmp_path),
        "DATA": str(sample_prefix),
        "DTYPE": "bf16",
        "ITERS": "1",
        "PATCH_FILE": str(patch),
    }
    verification = subprocess.run(
        (sys.executable, "-m", "parakit", "verify-tp2-gpt2-tiny-2cpu"),
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    printed = verification.stdout + verification.stderr
    (path,) = tmp_path.glob("*/verify/*/verdict.json")
    verdict = json.loads(path.read_text())
    assert verification.returncode == 1, printed
    assert verdict["in_fp32"] == "differs in fp32; in bf16 the rounding hides the error"
    assert (verdict["stage"], verdict["factor"]) == ("outputs", pytest.approx(1.0005, abs=1e-4))
