"""Check and prune a run's checkpoints while it trains, and select the one that a resume loads.

A resume needs a complete checkpoint. After a NaN the checkpoint must also have given a loss since it was saved.
When Megatron finds a NaN, it saves its weights before the update that would use the NaN (`rerun_state_machine`,
exit code 16). The weights themselves may already be damaged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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

LEAST_GRACE_SECONDS = 30.0
"""Time for a last checkpoint if no save was measured, or if saves were faster."""
_SAVE_TIME = re.compile(
    r"^\s*save-checkpoint\s*\.*: \((?P<fastest>[\d.]+), (?P<slowest>[\d.]+)\)", re.MULTILINE
)
"""Megatron's line of the time of a save: milliseconds of the fastest and the slowest rank."""
_LOG_TAIL_BYTES = 4 << 20


class CheckpointKeeper(BackgroundThread):
    """A thread that verifies new checkpoints and removes old ones during a `with` block, and once at its end.

    An old checkpoint is removed once `keep` newer ones were read back and have each given another loss.
    The newest checkpoint may hold the damage that only the next iteration shows.
    """

    def __init__(
        self, folder: Path, keep: int, log: Path, before_removal: Callable[[], None] | None = None
    ) -> None:
        """Prepare the thread.

        Args:
            folder: The folder with the run's checkpoints.
            keep: The number of valid checkpoints that are not removed.
            log: The run's log.
            before_removal: Called before old checkpoints are removed, because their room may hide a full disk.
        """
        self._folder = folder
        self._keep = keep
        self._before_removal = before_removal
        self._follower = LogFollower(log, log.stat().st_size)
        self._newest: Iteration | None = None
        """The last iteration that was logged; None before the first."""
        self._seen = read_tracker_time_ns(folder)
        """Time at which the tracker file was last written, when its checkpoints were last verified."""
        self._ended_well = False
        super().__init__()
        self.problems: list[str] = []
        """Problems with checkpoints that could not be read back or removed, one sentence each."""

    def _watch(self) -> None:
        with closing(self._follower), suppress(ReadingStoppedError):
            while not self.done.wait(LOOK_SECONDS):
                self._check_checkpoints()
            self._check_checkpoints()

    def mark_ended_well(self) -> None:
        """Note that the run ended without failure, so the last checkpoint needs no further loss."""
        self._ended_well = True

    def _check_checkpoints(self) -> None:
        """Verify the checkpoints that were finished since the last call, and prune old ones.

        What fails is added to `problems`.
        """
        new_iterations = self._follower.new_iterations()
        if new_iterations:
            self._newest = new_iterations[-1]
        stored = find_checkpoints(self._folder)
        finished = read_finished_iteration(self._folder)
        # Megatron writes the tracker file when a checkpoint is finished.
        announcement = read_tracker_time_ns(self._folder)
        if finished is not None and announcement != self._seen:
            self._seen = announcement
            for checkpoint in stored:
                if checkpoint.iteration <= finished and not checkpoint.is_verified:
                    self._verify(checkpoint)
        if self._before_removal is not None:
            self._before_removal()
        try:
            remove_old_checkpoints(
                [checkpoint for checkpoint in stored if self._is_valid(checkpoint)], self._keep
            )
        except OSError as error:
            self._add_problem(f"An old checkpoint could not be removed: {error}.")

    def _verify(self, checkpoint: Checkpoint) -> None:
        """Read a checkpoint back and write its manifest; add a problem if the checkpoint cannot be read."""
        try:
            verify_and_record(checkpoint, self._may_continue)
        except (DamagedCheckpointError, OSError) as error:
            self._add_problem(f"Checkpoint {checkpoint.path.name} cannot be read back: {error}.")

    def _is_valid(self, checkpoint: Checkpoint) -> bool:
        """Return True if the run has logged a loss after this checkpoint, and no NaN."""
        newest = self._newest
        if newest is None or newest.has_nan:
            return False
        return self._ended_well or checkpoint.iteration < newest.iteration

    def _may_continue(self) -> bool:
        """Return False once the run has failed: its status must not wait until gigabytes are read.

        The resume of a failed run reads its checkpoints back instead.
        """
        return self._ended_well or not self.done.is_set()

    def _add_problem(self, problem: str) -> None:
        """Add a sentence to `problems` unless it is already there."""
        if problem not in self.problems:
            self.problems.append(problem)


@dataclass(frozen=True)
class SelectedCheckpoint:
    """The checkpoint that a resume loads, and the newer ones that it skips."""

    checkpoint: Checkpoint
    skipped: tuple[tuple[Checkpoint, str], ...] = ()
    """Skipped newer checkpoints, each with the reason why it cannot be used."""


def select_checkpoint(run: Path, folder: Path | None = None) -> SelectedCheckpoint:
    """Return the newest valid checkpoint of a run, and the newer ones that are not valid.

    A missing manifest is written; nothing else is changed.

    Args:
        run: The run folder.
        folder: A folder with copies of the checkpoints; by default the run's own.

    Raises:
        LaunchError: The run has no checkpoint, or none that is valid.
    """
    skipped: list[tuple[Checkpoint, str]] = []
    last_valid = last_valid_iteration(run)
    stored = find_checkpoints(folder or run / CHECKPOINTS_FOLDER)
    for checkpoint in stored:
        if last_valid is not None and checkpoint.iteration >= last_valid:
            skipped.append((checkpoint, "the run ended in NaN before it gave a loss"))
            continue
        flaw = find_flaw(checkpoint)
        if flaw is None:
            return SelectedCheckpoint(checkpoint, tuple(skipped))
        skipped.append((checkpoint, flaw))
    if not stored:
        raise LaunchError(
            f"{run} holds no checkpoint; only a run that was started with SAVE_EVERY= and reached "
            "that iteration can be resumed."
        )
    reasons = "; ".join(f"{checkpoint.path.name}: {reason}" for checkpoint, reason in skipped)
    raise LaunchError(
        f"No checkpoint of {run} can be resumed from ({reasons}); start the run again."
    )


def choose_grace_seconds(asked_seconds: float | None, log: Path) -> float:
    """Return the time that ranks get for a last checkpoint: what the user asked for, or twice what a save took.

    The iteration that is under way when the request comes counts twice as well. The result is at least
    LEAST_GRACE_SECONDS unless the user asked for less.

    Args:
        asked_seconds: The value of GRACE=; None if it is not set.
        log: The run's log. Its end shows the last save and the last iteration.
    """
    if asked_seconds is not None:
        return asked_seconds
    tail_begin_bytes = max(0, log.stat().st_size - _LOG_TAIL_BYTES)
    with closing(LogFollower(log, tail_begin_bytes)) as follower:
        iterations = follower.new_iterations()
    with log.open("rb") as stream:
        stream.seek(tail_begin_bytes)
        tail = stream.read().decode(errors="replace")
    save_ms = 0.0
    for save_time in _SAVE_TIME.finditer(tail):
        save_ms = float(save_time["slowest"])
    iteration_ms = (iterations[-1].elapsed_ms if iterations else None) or 0.0
    return max(LEAST_GRACE_SECONDS, 2 * (save_ms + iteration_ms) / 1000)


def resume_if_saved(launch: Launch, folder: Path) -> Launch:
    """Return a launch that resumes from the folder's newest valid checkpoint, or `launch` if there is none.

    Slurm starts a requeued job with the same arguments, so its folder may hold an earlier attempt's
    checkpoints.

    Raises:
        LaunchError: There are checkpoints and none is valid, or the run has reached its last iteration.
    """
    stored = folder / CHECKPOINTS_FOLDER
    if not any(checkpoint.is_finished for checkpoint in find_checkpoints(stored)):
        return launch
    iteration = select_checkpoint(folder).checkpoint.iteration
    if iteration >= launch.iterations:
        raise LaunchError(f"{folder.name} has already reached iteration {iteration}.")
    return launch.resume_from(ResumePoint(folder.name, stored, iteration))


def last_valid_iteration(run: Path) -> int | None:
    """Return the newest iteration with a valid loss, if the last attempt of a run ended in NaN; otherwise None.

    Checkpoints of this iteration or later ones have not given a valid loss yet.
    """
    if not (run / records.STATUS_FILE).is_file():
        return None
    if records.read_status(run).status is not Status.NAN:
        return None
    newest_valid = previous = 0
    with closing(LogFollower(run / records.LOG_FILE)) as log:
        for logged in log.new_iterations():
            if logged.iteration <= previous:
                # A new attempt began here, from the checkpoint of the iteration before.
                newest_valid = logged.iteration - 1
            previous = logged.iteration
            if not logged.has_nan:
                newest_valid = logged.iteration
    return newest_valid
