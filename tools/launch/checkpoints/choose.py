"""Which checkpoint a run goes on from: the newest that is whole."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.launch.checkpoints.readable import DamagedCheckpointError
from tools.launch.checkpoints.stored import Checkpoint, check, find_checkpoints
from tools.launch.errors import LaunchError

DAMAGED = "damaged-"


@dataclass(frozen=True)
class Choice:
    """A checkpoint to go on from, and newer ones that cannot be."""

    checkpoint: Checkpoint
    damaged: tuple[tuple[Checkpoint, str], ...] = ()
    """Newer ones, each with what is wrong with it."""


def choose_checkpoint(folder: Path) -> Choice:
    """Look at a folder's checkpoints from the newest on; nothing is changed but for missing manifests.

    Raises:
        LaunchError: None of them is whole, or there is none.
    """
    damaged: list[tuple[Checkpoint, str]] = []
    for checkpoint in find_checkpoints(folder):
        try:
            check(checkpoint)
        except DamagedCheckpointError as error:
            damaged.append((checkpoint, str(error)))
        except OSError as error:
            raise LaunchError(
                f"{checkpoint.path} cannot be checked ({error.strerror}); free some room first."
            ) from error
        else:
            return Choice(checkpoint, tuple(damaged))
    if not damaged:
        raise LaunchError(
            f"{folder} holds no checkpoint; only a run that was started with SAVE_EVERY= and reached "
            "that iteration can be resumed."
        )
    told = "; ".join(f"{checkpoint.path.name}: {reason}" for checkpoint, reason in damaged)
    raise LaunchError(f"No checkpoint in {folder} is whole ({told}); start the run again.")


def set_aside(folder: Path, iteration: int) -> None:
    """Make way for a run that goes on from `iteration`, because no newer checkpoint can be loaded.

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
