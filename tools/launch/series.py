"""Several runs that belong together: all checked before the first starts, then one after another."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tools.launch.compose import Launch
from tools.launch.execute import execute
from tools.launch.experiment.finished import finished_run
from tools.launch.options import Options
from tools.launch.preflight import check
from tools.launch.start import ensure_start_checkpoint
from tools.launch.train import outcome
from tools.records.run import StatusRecord, read_status
from tools.spec.files import ROOT
from tools.spec.run import Backend

Finished = list[tuple[Path, StatusRecord]]


def run_series(
    launches: Sequence[Launch], options: Options, console: Console, go_on: bool = False
) -> Finished:
    """Train them all; return their folders and how they ended.

    With `go_on` a run that was made before, the same in everything, is taken instead.

    Raises:
        LaunchError: One of them cannot work here; nothing was started.
    """
    for launch in launches:
        check(launch, options.runs)
    for launch in launches:
        ensure_start_checkpoint(launch, options, console)
    finished: Finished = []
    started = time.monotonic()
    for number, launch in enumerate(launches, start=1):
        title = f"[{number}/{len(launches)}] {title_of(launch)}"
        made = finished_run(launch, options.runs) if go_on else None
        if made is not None:
            finished.append((made, read_status(made)))
            console.print(f"{title}: made before → {made.name}", highlight=False, markup=False)
            continue
        finished.append(execute(launch, options.runs, console, title))
        remaining = (time.monotonic() - started) / number * (len(launches) - number)
        left = f", about {remaining:.0f} s left" if number < len(launches) else ""
        console.print(f"{title}: {outcome(*finished[-1])}{left}", highlight=False, markup=False)
    return finished


def title_of(launch: Launch) -> str:
    """The strategy, and the backend unless it is Megatron."""
    other = launch.spec.backend is not Backend.MEGATRON
    return f"{launch.spec.backend} {launch.spec.name}" if other else launch.spec.name


def build_report(finished: Finished, name: str) -> int:
    """`python -m tools.report build` of these runs; its exit code."""
    return run_module(
        "tools.report", "build", *(str(folder) for folder, _ in finished), "--name", name
    )


def run_module(*arguments: str) -> int:
    """`python -m …` from the repository root; its exit code."""
    return subprocess.run((sys.executable, "-m", *arguments), cwd=ROOT, check=False).returncode
