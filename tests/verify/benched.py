"""The verify benchmark as a command, and the injected bugs of the default suite."""

import subprocess
import sys
from pathlib import Path

from parakit.config.files import ROOT
from parakit.experiments.verify.verifier import ForkedRanks, Verifier
from tests.verify.bench import LOGGED, Bench, verify_injected, verify_resumed

QUICK = ("last-stage-one-batch-ahead", "qkv-input-gradient-not-summed")
"""Of batch and backward pass; of pp2 and tp2, which share a reference."""
QUICK_LOGGED = ("logged-loss-doubled",)
"""Of what is printed; of tp2, with the same reference."""

QUICK_RESUMED = ("moments-not-resumed",)
"""Of a run that resumes."""
PACKED_FLAGS = (
    *("--num-layers", "1", "--calculate-per-token-loss"),
    *("--dataloader-inter-document-masking", "--micro-batch-size", "1"),
)
"""Flags of a healthy run whose sequences are packed from documents."""


def bench(sample_prefix: Path, folder: Path, *bench_arguments: str) -> str:
    """What the benchmark prints; it ends with 0 only if all is as it should be."""
    command = (
        sys.executable,
        "-m",
        "tests.verify.bench",
        *bench_arguments,
        "--folder",
        str(folder),
    )
    ended = subprocess.run(
        (*command, "--data", str(sample_prefix)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    return ended.stdout


def quick_injected(runs: Path, data: Path, ranks: ForkedRanks) -> str:
    """What is printed of `QUICK`, `QUICK_LOGGED` and `QUICK_RESUMED`, and the verdicts of healthy runs."""
    folder = runs / "quick_injected"
    folder.mkdir()
    verifier = Verifier(folder, ranks)
    bench = Bench(str(data), verifier, small=True)
    rows = (
        *verify_injected(bench, QUICK),
        *verify_injected(bench, QUICK_LOGGED, LOGGED),
        *verify_resumed(bench, QUICK_RESUMED),
    )
    healthy = bench.verify(
        *("zero1", "gpt2-tiny", 2, ("--num-layers", "1")), iteration=None, resumed="1"
    )
    tuned = bench.verify(
        *("cp2", "gpt2-tiny", 2, PACKED_FLAGS), ROOT / "examples/losses/grpo.py", both=True
    )
    sentences = (
        f"resumed: {healthy.verdict.sentence}",
        f"fine-tuned: {tuned.verdict.sentence}",
    )
    printed = "\n".join((*(row.line() for row in rows), *sentences))
    verifier.remove_references()
    return printed
