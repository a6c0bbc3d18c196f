"""Add values that depend on the clone in which make runs, and train and draw for `make trace-…`."""

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
from parakit.config.settings import CALIBRATION, ITERS, READINGS, RUN, RUNS
from parakit.config.variable_groups import PLAN_GPU, READ_RUNS

TRACE = "trace-"
TRACED_ITERATIONS = "6"
"""The default of ITERS=, enough for one steady iteration after warm-up."""

VariableTexts = dict[str, str]
"""Values of make variables as the user wrote them, by name."""


def add_own_measurements(texts: Mapping[str, str]) -> VariableTexts:
    """Return a plan's variables with CALIBRATION= and READINGS= set to this clone's files, if the files exist.

    CALIBRATION= is the calibration of the planned device by `make calibrate`. READINGS= is the file of the user's
    own measurements. Values that the user wrote are not changed.
    """
    completed = dict(texts)
    if CALIBRATION.name not in texts:
        calibration = _find_calibration(texts.get(PLAN_GPU.name, PLAN_GPU.default))
        if calibration:
            completed[CALIBRATION.name] = str(calibration)
    if READINGS.name not in texts and USER_MEASUREMENTS_FILE.is_file():
        completed[READINGS.name] = str(USER_MEASUREMENTS_FILE)
    return completed


def add_own_runs(texts: Mapping[str, str]) -> VariableTexts:
    """Return a report's variables with READINGS= set to the file to which the report adds its runs.

    READINGS= is not set for runs in another folder, because they may be somebody else's. As a side effect, Slurm
    jobs that have ended are first recorded in their run folders.
    """
    runs = ROOT / texts.get(RUNS.name, READ_RUNS.default)
    if any(runs.glob("*/job.json")):
        from parakit.launch import read_run_statuses

        read_run_statuses(runs)
    defaults = {} if RUNS.name in texts else {READINGS.name: str(USER_MEASUREMENTS_FILE)}
    return {**defaults, **texts}


def move_run_folders(texts: Mapping[str, str]) -> VariableTexts:
    """Return the variables of `explain`, with run folders that RUNS= names moved to RUN=.

    RUNS= names the folder that contains runs, but older versions took run folders there. The variables are
    returned unchanged if RUNS= is empty or names a folder that is no run.
    """
    names = texts.get(RUNS.name, "").split()
    are_run_folders = all(is_run_folder(ROOT / name) for name in names)
    if not names or not are_run_folders:
        return dict(texts)
    named_before = texts.get(RUN.name)
    if named_before:
        names.insert(0, named_before)
    return {RUN.name: " ".join(names)}


def train_and_trace(target: str, variables: Namespace) -> int:
    """Train a target for a few iterations, and draw one of them; return the exit code of the first failure.

    Args:
        target: `trace-` and the name of a target without `train-`.
        variables: The variables; ITERS= sets the number of iterations, and DRY_RUN=1 draws nothing.
    """
    traced = target.removeprefix(TRACE)
    command = (sys.executable, "-m", "parakit", f"train-{traced}")
    iterations = variables.texts.get(ITERS.name, TRACED_ITERATIONS)
    environment = {**os.environ, "MAKEFLAGS": "", ITERS.name: iterations}
    # Ctrl-C also reaches the command, which ends its ranks. This process must wait for that. A handler, unlike
    # SIG_IGN, is not inherited by the command.
    handler_before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.call(command, env=environment, cwd=ROOT)
    finally:
        signal.signal(signal.SIGINT, handler_before)
    if code or variables.dry_run:
        return code
    from parakit.reporting import trace

    return trace(traced, variables.runs or Path(READ_RUNS.default))


def _find_calibration(device: str) -> Path | None:
    """Return this clone's calibration file of a device, relative to ROOT; None if there is none.

    An unknown device also gives None, because the planner refuses it later.
    """
    try:
        path = Path(READ_RUNS.default) / calibration_file_name(device_by_key(device).key)
    except UnknownHardwareError:
        return None
    return path if (ROOT / path).is_file() else None
