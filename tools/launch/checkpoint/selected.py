"""Which of a run's checkpoints it resumes from.

It must be whole. After a NaN it must also have given a loss since it was saved: Megatron saves what it
has when it finds a NaN (`rerun_state_machine`, exit code 16), before the update that would use it, but
the weights themselves may be damaged.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tools.launch.progress import LogFollower
from tools.records import run as records
from tools.records.checkpoints import Checkpoint, check, find_checkpoints
from tools.records.run import CHECKPOINTS_FOLDER, Status
from tools.records.torch_dist import DamagedCheckpointError
from tools.spec.errors import LaunchError


@dataclass(frozen=True)
class SelectedCheckpoint:
    """A checkpoint to resume from, and newer ones that are skipped."""

    checkpoint: Checkpoint
    skipped: tuple[tuple[Checkpoint, str], ...] = ()
    """Newer ones, each with what is wrong with it."""


def select_checkpoint(run: Path) -> SelectedCheckpoint:
    """Look at a run's checkpoints from the newest on; nothing is changed but for missing manifests.

    Raises:
        LaunchError: None of them is valid, or there is none.
    """
    skipped: list[tuple[Checkpoint, str]] = []
    newest_number = last_valid_iteration(run)
    stored = find_checkpoints(run / CHECKPOINTS_FOLDER)
    for checkpoint in stored:
        why_not = _flaw(checkpoint, newest_number)
        if why_not is None:
            return SelectedCheckpoint(checkpoint, tuple(skipped))
        skipped.append((checkpoint, why_not))
    if not stored:
        raise LaunchError(
            f"{run} holds no checkpoint; only a run that was started with SAVE_EVERY= and reached "
            "that iteration can be resumed."
        )
    flaws = "; ".join(f"{checkpoint.path.name}: {flaw}" for checkpoint, flaw in skipped)
    raise LaunchError(f"No checkpoint of {run} can be resumed from ({flaws}); start the run again.")


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


def last_valid_iteration(run: Path) -> int | None:
    """The newest iteration that gave a loss in a run's last attempt, if that ended in NaN, else None.

    A checkpoint of that iteration or a later one has given no loss yet.
    """
    if not (run / records.STATUS_FILE).is_file():
        return None
    if records.read_status(run).status is not Status.NAN:
        return None
    newest = last = 0
    with closing(LogFollower(run / records.LOG_FILE)) as log:
        for found in log.new_iterations():
            if found.iteration <= last:  # Another attempt, from the checkpoint before it.
                newest = found.iteration - 1
            last = found.iteration
            newest = newest if found.has_nan else last
    return newest
