"""`make parity`: the demo's runs as a check, which fails unless every strategy's losses agree."""

from __future__ import annotations

import csv
from pathlib import Path

from rich.console import Console

from tools.launch.demo import demo
from tools.launch.options import Options
from tools.spec.files import ROOT

REPORT = "parity"
_AGREES = {"reference", "held"}


def parity(options: Options, console: Console) -> int:
    """Train the six strategies from one start; 0 if all ended well and no loss curve left baseline's.

    Raises:
        LaunchError: It cannot work here.
    """
    results = ROOT / "reports" / REPORT / "results.csv"
    results.unlink(missing_ok=True)
    ended = demo(options, console, REPORT)
    if not results.exists():
        return ended or 1
    broken = disagreements(results)
    for sentence in broken:
        console.print(sentence, style="red", markup=False, highlight=False, soft_wrap=True)
    if not broken:
        console.print("Parity: every strategy's losses agree with baseline's.", highlight=False)
    return ended or int(bool(broken))


def disagreements(results: Path) -> list[str]:
    """A sentence for every row of `results.csv` whose parity is not `reference` or `held`."""
    with results.open(newline="") as file:
        return [
            f"Parity of {row['strategy']}: {row['parity'] or 'not known'} (status {row['status']})."
            for row in csv.DictReader(file)
            if row["parity"] not in _AGREES
        ]
