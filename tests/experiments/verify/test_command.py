"""`make verify-…` with real ranks (slow): causes of an early end, and the native reference."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from parakit.artifacts.capture import TENSORS_FILE
from parakit.config.files import ROOT
from parakit.launch.supervise.interruption import is_alive

pytestmark = pytest.mark.slow

BASELINE = "verify-baseline-gpt2-tiny-1cpu"
ALIKE = "tests/verify/injected_bugs/alike"
Starter = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, sample_prefix: Path, starting_weights: Path) -> Iterator[Starter]:
    (tmp_path / ".start").symlink_to(starting_weights)
    begun: list[subprocess.Popen[str]] = []

    def verify(name: str, **variables: str) -> subprocess.Popen[str]:
        environment = {"RUNS": str(tmp_path), "DATA": str(sample_prefix), **variables}
        process = subprocess.Popen(
            (sys.executable, "-m", "parakit", name),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        begun.append(process)
        return process

    yield verify
    for process in begun:
        if process.poll() is None:
            process.terminate()
            process.communicate()


def verdict_in(runs: Path) -> dict[str, Any]:
    (path,) = runs.glob("*/verify/*/verdict.json")
    verdict: dict[str, Any] = json.loads(path.read_text())
    return verdict


def in_the_capture(runs: Path, process: "subprocess.Popen[str]") -> psutil.Process:
    """Wait until the rank of the reference writes its tensors. Return the rank's process."""
    pattern = f"*/tensors/reference/rank-0/{TENSORS_FILE}"
    while not any(path.stat().st_size > 1e6 for path in runs.glob(pattern)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    (rank,) = (
        process_of_rank
        for process_of_rank in psutil.Process(process.pid).children(recursive=True)
        if process_of_rank.name() == "rank0"
    )
    return rank


def test_ctrl_c_in_a_capture_leaves_no_rank_and_no_tensors(start: Starter, tmp_path: Path) -> None:
    process = start(BASELINE)
    rank = in_the_capture(tmp_path, process)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate()
    assert process.returncode == 130, printed
    assert "Interrupted" in printed
    assert "Traceback" not in printed
    assert not is_alive(rank)
    assert not list(tmp_path.glob("*/tensors"))


def test_a_rank_that_is_killed_in_a_capture_makes_it_not_comparable(
    start: Starter, tmp_path: Path
) -> None:
    process = start(BASELINE)
    in_the_capture(tmp_path, process).kill()
    printed, _ = process.communicate()
    assert process.returncode == 2, printed
    assert "not comparable: The reference ended" in printed
    assert "Traceback" not in printed
    assert verdict_in(tmp_path)["verdict"] == "not comparable"
    assert not list(tmp_path.glob("*/tensors"))


def test_refusal_of_megatron_is_quoted_verbatim(start: Starter, tmp_path: Path) -> None:
    process = start(BASELINE, EXTRA="--recompute-granularity full")
    printed, _ = process.communicate()
    assert process.returncode == 2, printed
    assert "recompute" in verdict_in(tmp_path)["reason"]


@pytest.mark.parametrize(
    ("name", "bug", "expected"),
    [
        (BASELINE, "", ("held", None, None)),
        ("verify-tp2-gpt2-tiny-2cpu", "", ("held", None, None)),
        ("verify-ep2-moe-tiny-2cpu", "", ("held", None, None)),
        (
            BASELINE,
            "softmax_scale",
            ("differs", "outputs", "decoder.layers.0.self_attention.core_attention"),
        ),
        (
            "verify-baseline-moe-tiny-1cpu",
            "balance_twice",
            ("differs", "activation gradients", "decoder.layers.3.mlp.router"),
        ),
    ],
)
def test_native_reference_detects_bugs_of_all_megatron_strategies_and_nothing_else(
    start: Starter, tmp_path: Path, name: str, bug: str, expected: tuple[str, ...]
) -> None:
    injected = {"PATCH_FILE": f"{ALIKE}/{bug}.py"} if bug else {}
    process = start(name, REFERENCE="native", **injected)
    printed, _ = process.communicate()
    verdict = verdict_in(tmp_path)
    assert (verdict["verdict"], verdict["stage"], verdict["module"]) == expected, printed
