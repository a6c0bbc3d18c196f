"""Plants are found, and healthy layouts are not called wrong, by the whole: ranks, capture, verdict."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.spec.files import ROOT

QUICK = (
    *("last-stage-one-batch-ahead", "row-linear-without-sum", "predicted-logit-not-summed"),
    *(
        "qkv-input-gradient-not-summed",
        "weight-gradient-of-other-rows",
        "tied-embedding-not-summed",
    ),
    *("norm-counts-replicas", "adam-epsilon-of-a-rank"),
)
"""Of each stage but the optimizer's, of tp2 and pp2, which share a reference."""


def bench(sample_prefix: Path, folder: Path, *words: str) -> str:
    """What the benchmark prints; it ends with 0 only if all is as it should be."""
    command = (sys.executable, "-m", "tests.verify.bench", *words, "--folder", str(folder))
    ended = subprocess.run(
        (*command, "--data", str(sample_prefix)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    return ended.stdout


def test_eight_plants_of_all_kinds_are_found_at_their_stage_and_module(
    sample_prefix: Path, starting_weights: Path, tmp_path: Path
) -> None:
    (tmp_path / ".start").symlink_to(starting_weights)
    printed = bench(sample_prefix, tmp_path, "plants", "--only", *QUICK)
    assert printed.count("| yes |") == len(QUICK)


@pytest.mark.slow
def test_every_plant_is_found_at_its_stage_and_module(sample_prefix: Path, tmp_path: Path) -> None:
    bench(sample_prefix, tmp_path, "plants")


@pytest.mark.slow
def test_every_plant_of_a_resumed_run_is_found(sample_prefix: Path, tmp_path: Path) -> None:
    bench(sample_prefix, tmp_path, "resumed")


@pytest.mark.slow
def test_a_loss_that_depends_on_the_micro_batch_is_found_unplanted(
    sample_prefix: Path, tmp_path: Path
) -> None:
    bench(sample_prefix, tmp_path, "live", "--only", "tokens-ahead-by-micro-batch")


@pytest.mark.slow
def test_no_healthy_layout_is_called_wrong(sample_prefix: Path, tmp_path: Path) -> None:
    assert "differs" not in bench(sample_prefix, tmp_path, "healthy")
