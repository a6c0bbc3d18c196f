"""What make adds from the clone that it runs in, and the two targets that are several commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from parakit.artifacts.run import is_run_folder
from parakit.config.files import ROOT, USER_MEASUREMENTS_FILE
from parakit.config.hardware import UnknownHardwareError, calibration_file_name, device_by_key
from parakit.config.settings import CALIBRATION, GPU, ITERS, READINGS, RUN, RUNS

TRACE = "trace-"
TRACED_ITERATIONS = "6"
"""Enough for one steady iteration after the first."""

Texts = dict[str, str]
"""Variables as they were given."""


def add_own_measurements(texts: Mapping[str, str]) -> Texts:
    """Of a plan: what `make calibrate` measured on this machine's own devices, and one's own runs."""
    found = dict(texts)
    if CALIBRATION.name not in texts and (measured := _calibrated(texts.get(GPU.name, "h200"))):
        found[CALIBRATION.name] = str(measured)
    if READINGS.name not in texts and USER_MEASUREMENTS_FILE.is_file():
        found[READINGS.name] = str(USER_MEASUREMENTS_FILE)
    return found


def add_own_runs(texts: Mapping[str, str]) -> Texts:
    """Of a report: where it adds the runs that it measures; jobs that Slurm ended are recorded first.

    Runs of another folder may be somebody else's: READINGS= adds them.
    """
    runs = ROOT / texts.get(RUNS.name, "runs")
    if any(runs.glob("*/job.json")):
        from parakit.launch import read_run_statuses

        read_run_statuses(runs)
    here = {} if RUNS.name in texts else {READINGS.name: str(USER_MEASUREMENTS_FILE)}
    return {**here, **texts}


def move_run_folders(texts: Mapping[str, str]) -> Texts:
    """RUNS= of `explain` is the runs folder; words that are run folders, as it once took, are RUN='s."""
    named = texts.get(RUNS.name, "").split()
    if not named or not all(is_run_folder(ROOT / word) for word in named):
        return dict(texts)
    every = " ".join(filter(None, (texts.get(RUN.name), *named)))
    return {RUN.name: every}


def train_and_trace(target: str, given: Namespace) -> int:
    """Train `train-X` for a few iterations, and draw one of them."""
    traced = target.removeprefix(TRACE)
    command = (sys.executable, "-m", "parakit", f"train-{traced}")
    iterations = given.texts.get(ITERS.name, TRACED_ITERATIONS)
    environment = {**os.environ, "MAKEFLAGS": "", ITERS.name: iterations}
    # Ctrl-C reaches the command too, which handles it itself; a Python handler is not inherited.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.call(command, env=environment, cwd=ROOT)
    finally:
        signal.signal(signal.SIGINT, before)
    if code or given.dry_run:
        return code
    from parakit.reporting import trace as draw

    return draw(traced, given.runs or Path("runs"))


def _calibrated(device: str) -> Path | None:
    try:
        path = Path("runs") / calibration_file_name(device_by_key(device).key)
    except UnknownHardwareError:  # The planner says so, for every way to call it.
        return None
    return path if (ROOT / path).is_file() else None
