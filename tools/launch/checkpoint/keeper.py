"""While a run trains: each new checkpoint is read back, and then older ones may go."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

from tools.launch.background import BackgroundThread
from tools.launch.progress import LogFollower
from tools.records.checkpoints import Checkpoint, find_checkpoints, prune, verify
from tools.records.torch_dist import (
    DamagedCheckpointError,
    ReadingStoppedError,
    announced,
    finished_iteration,
)
from tools.report.read.iterations import Iteration

LOOK_SECONDS = 0.5


class Keeper(BackgroundThread):
    """Looks after a checkpoint folder, in a thread, while the `with` block runs, and once at its end.

    Older checkpoints go once as many newer ones as shall be kept were read back and have each given
    another loss: what was saved last may hold the damage that shows in the next iteration.
    """

    def __init__(self, folder: Path, keep: int, log: Path) -> None:
        self._folder = folder
        self._keep = keep
        self._follower = LogFollower(log, log.stat().st_size)
        self._newest: Iteration | None = None
        self._seen = announced(folder)
        self._ended_well = False
        super().__init__()
        self.problems: list[str] = []
        """Checkpoints that could not be read back, a sentence each."""

    def watch(self) -> None:
        """As `BackgroundThread.watch`."""
        with closing(self._follower), suppress(ReadingStoppedError):
            while not self.done.wait(LOOK_SECONDS):
                self._look()
            self._look()

    def ended_well(self) -> None:
        """Nothing comes after the last checkpoint any more."""
        self._ended_well = True

    def _look(self) -> None:
        self._newest = next(reversed(self._follower.new_iterations()), self._newest)
        stored = find_checkpoints(self._folder)
        newest, said = finished_iteration(self._folder), announced(self._folder)
        if newest is not None and said != self._seen:
            self._seen = said
            self._verify(checkpoint for checkpoint in stored if checkpoint.iteration <= newest)
        try:
            prune([checkpoint for checkpoint in stored if self._is_valid(checkpoint)], self._keep)
        except OSError as error:
            self._note(f"An old checkpoint could not be removed: {error}.")

    def _is_valid(self, checkpoint: Checkpoint) -> bool:
        newest = self._newest
        if newest is None or newest.has_nan:
            return False
        return self._ended_well or checkpoint.iteration < newest.iteration

    def _verify(self, checkpoints: Iterable[Checkpoint]) -> None:
        for checkpoint in checkpoints:
            if checkpoint.is_verified:
                continue
            try:
                verify(checkpoint, self._has_time)
            except (DamagedCheckpointError, OSError) as error:
                self._note(f"Checkpoint {checkpoint.path.name} cannot be read back: {error}.")

    def _has_time(self) -> bool:
        """A failed run's status must not wait for gigabytes; its resume reads them back as well."""
        return self._ended_well or not self.done.is_set()

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
