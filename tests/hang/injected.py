"""Faults at random calls of real Megatron runs on CPU ranks, and what is said of each.

`python -m tests.hang.injected SEED CASES FOLDER [STRATEGY:RANKS …]` writes a line of JSON a case.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.small import SMALL, folded
from tools.spec.files import ROOT

STRATEGIES = (
    "dp2:2",
    "tp2:2",
    "sp2:2",
    "pp2:2",
    "cp2:2",
    "zero1:2",
    "tp2dp2:4",
    "tp2pp2:4",
    "dp2pp2:4",
)
KINDS = ("sleep", "loop", "stop", "skip", "twice", "size", "dtype", "barrier", "data")
HANG_SECONDS = 20


def small_data(folder: Path) -> Path:
    """The kit's sample in a small vocabulary."""
    prefix = folder / "sample_text_document"
    if not prefix.with_suffix(".bin").exists():
        words = ("sample", "--output-prefix", str(folder / "sample"))
        subprocess.run((sys.executable, "-m", "tools.preprocess", *words), cwd=ROOT, check=True)
    small = folder / "small"
    small.mkdir(exist_ok=True)
    return folded(prefix, small)


def run_case(folder: Path, data: Path, strategy: str, ranks: int, fault: str) -> dict[str, Any]:
    """One run with a fault to its end; what `status.json` and `make why-hang` say."""
    before = set(folder.glob("2*"))
    environment = {
        **os.environ,
        "WHY_HANG_FAULT": fault,
        "PATCH_FILE": str(ROOT / "tests/hang/fault.py"),
        "HANG_TIMEOUT": str(HANG_SECONDS),
        **{"ITERS": "12", "MICRO_BATCH": "2", "GLOBAL_BATCH": "8", "LEDGER": "0"},
        **{"DATA": str(data), "RUNS": str(folder), "EXTRA": " ".join(SMALL)},
    }
    target = f"train-{strategy}-gpt2-tiny-{ranks}cpu"
    ended = subprocess.run(
        (sys.executable, "-m", "tools.cli", target),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    made = set(folder.glob("2*")) - before
    if not made:
        return {"case": [strategy, fault], "outcome": ended.stdout[-500:] + ended.stderr[-500:]}
    run = made.pop()
    status = json.loads((run / "status.json").read_text())
    victim = fault.split()[1]
    is_hang = status["reason"].startswith("Hang")
    outcome = "no hang" if not is_hang else status["rank"]
    return {
        "case": [strategy, fault],
        "named": outcome == int(victim),
        "outcome": outcome,
        "run": run.name,
        "reason": status["reason"],
    }


def main(seed: int, cases: int, folder: Path, *strategies: str) -> None:
    """Draw cases and run them."""
    folder.mkdir(parents=True, exist_ok=True)
    data = small_data(folder)
    drawn = random.Random(seed)
    for _ in range(cases):
        strategy, _, ranks = drawn.choice(strategies or STRATEGIES).partition(":")
        kind, victim = drawn.choice(KINDS), drawn.randrange(int(ranks))
        call = drawn.randrange(1, 150 if strategy[:2] in ("tp", "sp", "cp") else 12)
        found = run_case(folder, data, strategy, int(ranks), f"{kind} {victim} {call}")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
