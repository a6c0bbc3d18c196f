"""Which checkpoint a run goes on from: the newest that is whole and sound."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.launch.checkpoints.readable import DamagedCheckpointError
from tools.launch.checkpoints.sound import newest_number_before_nan
from tools.launch.checkpoints.stored import Checkpoint, check, find_checkpoints
from tools.launch.errors import LaunchError
from tools.records.run import CHECKPOINTS_FOLDER

DAMAGED = "damaged-"


@dataclass(frozen=True)
class Choice:
    """A checkpoint to go on from, and newer ones that are passed over."""

    checkpoint: Checkpoint
    passed_over: tuple[tuple[Checkpoint, str], ...] = ()
    """Newer ones, each with what is wrong with it."""


def choose_checkpoint(run: Path) -> Choice:
    """Look at a run's checkpoints from the newest on; nothing is changed but for missing manifests.

    Raises:
        LaunchError: None of them can be gone on from, or there is none.
    """
    passed_over: list[tuple[Checkpoint, str]] = []
    newest_number = newest_number_before_nan(run)
    stored = find_checkpoints(run / CHECKPOINTS_FOLDER)
    for checkpoint in stored:
        why_not = _flaw(checkpoint, newest_number)
        if why_not is None:
            return Choice(checkpoint, tuple(passed_over))
        passed_over.append((checkpoint, why_not))
    if not stored:
        raise LaunchError(
            f"{run} holds no checkpoint; only a run that was started with SAVE_EVERY= and reached "
            "that iteration can be resumed."
        )
    told = "; ".join(f"{checkpoint.path.name}: {flaw}" for checkpoint, flaw in passed_over)
    raise LaunchError(f"No checkpoint of {run} can be gone on from ({told}); start the run again.")


def set_aside(folder: Path, iteration: int) -> None:
    """Make way for a run that goes on from `iteration`, because newer checkpoints are passed over.

    Unfinished ones go, damaged ones get another name.
    """
    for checkpoint in find_checkpoints(folder):
        if checkpoint.iteration <= iteration:
            continue
        if not checkpoint.is_finished:
            shutil.rmtree(checkpoint.path)
            continue
        aside = checkpoint.path.with_name(DAMAGED + checkpoint.path.name)
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.path.rename(aside)


def _flaw(checkpoint: Checkpoint, newest_number: int | None) -> str | None:
    if newest_number is not None and checkpoint.iteration >= newest_number:
        return "the run ended in NaN before it gave a loss"
    try:
        check(checkpoint)
    except DamagedCheckpointError as error:
        return str(error)
    except OSError as error:
        raise LaunchError(
            f"{checkpoint.path} cannot be checked ({error.strerror}); free some room first."
        ) from error
    return None
