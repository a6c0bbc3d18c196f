"""Three updates of a small GPT with Megatron, without patches and with sets of patches."""

import json
import os
import subprocess
import sys
from typing import Any

from megatron_patches.fusions import NAMES
from parakit.config.files import ROOT
from tests.patience import OF_A_RUN

ALL = ",".join(name for name in NAMES if not name.startswith("attention_"))
SAME_ARITHMETIC = "cross_entropy,adamw,multi_tensor"
"""Patches that round where Megatron rounds; the others round a compiled function only at its end."""
ON_HOST = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
Figures = dict[str, Any]
PRECISIONS = {"": ("fp32", "bf16"), ALL: ("fp32", "bf16"), SAME_ARITHMETIC: ("bf16",)}
"""Precisions in which a process trains, by patches."""


def fused_updates(*_: object) -> dict[str, Figures]:
    """Return the figures of each set of patches, computed in processes forked from a single process."""
    done = subprocess.run(
        (sys.executable, "-m", "tests.patches.fused.in_megatron", json.dumps(PRECISIONS)),
        cwd=ROOT,
        env=os.environ | ON_HOST,
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * OF_A_RUN,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Figures] = json.loads(done.stdout.splitlines()[-1])
    return figures
