"""A run's checkpoints: looked after while it trains, chosen when it resumes.

To resume from, a checkpoint must be whole. After a NaN it must also have given a loss since it was
saved: Megatron saves what it has when it finds a NaN (`rerun_state_machine`, exit code 16), before the
update that would use it, but the weights themselves may be damaged.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from parakit.artifacts import run as records
from parakit.artifacts.checkpoints import (
    Checkpoint,
    find_checkpoints,
    find_flaw,
    remove_old_checkpoints,
    verify_and_record,
)
from parakit.artifacts.run import CHECKPOINTS_FOLDER, Status
from parakit.artifacts.torch_dist import (
    DamagedCheckpointError,
    ReadingStoppedError,
    read_finished_iteration,
    read_tracker_time_ns,
)
from parakit.config.errors import LaunchError
from parakit.launch.background import BackgroundThread
from parakit.launch.compose import Launch, ResumePoint
from parakit.launch.progress import LogFollower
from parakit.logs import Iteration

LOOK_SECONDS = 0.5


class CheckpointKeeper(BackgroundThread):
    """Looks after a checkpoint folder, in a thread, while the `with` block runs, and once at its end.

    Older checkpoints go once as many newer ones as shall be kept were read back and have each given
    another loss: what was saved last may hold the damage that shows in the next iteration.
    """

    def __init__(self, folder: Path, keep: int, log: Path) -> None:
        self._folder = folder
        self._keep = keep
        self._follower = LogFollower(log, log.stat().st_size)
        self._newest: Iteration | None = None
        self._seen = read_tracker_time_ns(folder)
        self._ended_well = False
        super().__init__()
        self.problems: list[str] = []
        """Checkpoints that could not be read back, a sentence each."""

    def _watch(self) -> None:
        with closing(self._follower), suppress(ReadingStoppedError):
            while not self.done.wait(LOOK_SECONDS):
                self._look()
            self._look()

    def mark_ended_well(self) -> None:
        """Nothing comes after the last checkpoint any more."""
        self._ended_well = True

    def _look(self) -> None:
        self._newest = next(reversed(self._follower.new_iterations()), self._newest)
        stored = find_checkpoints(self._folder)
        newest, said = read_finished_iteration(self._folder), read_tracker_time_ns(self._folder)
        if newest is not None and said != self._seen:
            self._seen = said
            for checkpoint in stored:
                if checkpoint.iteration > newest or checkpoint.is_verified:
                    continue
                try:
                    verify_and_record(checkpoint, self._has_time)
                except (DamagedCheckpointError, OSError) as error:
                    self._note(f"Checkpoint {checkpoint.path.name} cannot be read back: {error}.")
        try:
            remove_old_checkpoints(
                [checkpoint for checkpoint in stored if self._is_valid(checkpoint)], self._keep
            )
        except OSError as error:
            self._note(f"An old checkpoint could not be removed: {error}.")

    def _is_valid(self, checkpoint: Checkpoint) -> bool:
        newest = self._newest
        if newest is None or newest.has_nan:
            return False
        return self._ended_well or checkpoint.iteration < newest.iteration

    def _has_time(self) -> bool:
        """A failed run's status must not wait for gigabytes; its resume reads them back as well."""
        return self._ended_well or not self.done.is_set()

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


@dataclass(frozen=True)
class SelectedCheckpoint:
    """A checkpoint to resume from, and newer ones that are skipped."""

    checkpoint: Checkpoint
    skipped: tuple[tuple[Checkpoint, str], ...] = ()
    """Newer ones, each with what is wrong with it."""


def select_checkpoint(run: Path, folder: Path | None = None) -> SelectedCheckpoint:
    """Look at a run's checkpoints from the newest on; nothing is changed but for missing manifests.

    Args:
        run: The run's folder.
        folder: Where copies of them are; its own by default.

    Raises:
        LaunchError: None of them is valid, or there is none.
    """
    skipped: list[tuple[Checkpoint, str]] = []
    newest_number = last_valid_iteration(run)
    stored = find_checkpoints(folder or run / CHECKPOINTS_FOLDER)
    for checkpoint in stored:
        if newest_number is not None and checkpoint.iteration >= newest_number:
            why_not: str | None = "the run ended in NaN before it gave a loss"
        else:
            why_not = find_flaw(checkpoint)
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


def resume_if_saved(launch: Launch, folder: Path) -> Launch:
    """A launch for a folder that an earlier attempt of the same run may have left checkpoints in.

    A job that is put back into its queue starts with the same arguments: it resumes from the newest
    valid checkpoint, and begins where there is none.

    Raises:
        LaunchError: There are checkpoints, and none is valid.
    """
    stored = folder / CHECKPOINTS_FOLDER
    if not any(checkpoint.is_finished for checkpoint in find_checkpoints(stored)):
        return launch
    iteration = select_checkpoint(folder).checkpoint.iteration
    if iteration >= launch.iterations:
        raise LaunchError(f"{folder.name} has already reached iteration {iteration}.")
    return launch.resume_from(ResumePoint(folder.name, stored, iteration))


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
