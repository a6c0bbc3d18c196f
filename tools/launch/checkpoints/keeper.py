"""Beside a run that saves: each new checkpoint is read back, and then older ones may go."""

from __future__ import annotations

from pathlib import Path

from tools.launch.beside import Beside
from tools.launch.checkpoints.readable import DamagedCheckpointError
from tools.launch.checkpoints.stored import find_checkpoints, finished_iteration, prove, prune

LOOK_SECONDS = 0.5


class Keeper(Beside):
    """Looks after a checkpoint folder, in a thread, while the `with` block runs, and once at its end."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._seen = finished_iteration(folder)
        super().__init__()
        self.problems: list[str] = []
        """Checkpoints that could not be read back, a sentence each."""

    def watch(self) -> None:
        """As `Beside.watch`."""
        while not self.done.wait(LOOK_SECONDS):
            self._look()
        self._look()

    def _look(self) -> None:
        newest = finished_iteration(self._folder)
        if newest is None or newest == self._seen:
            return
        self._seen = newest
        stored = find_checkpoints(self._folder)
        for checkpoint in stored:
            if checkpoint.iteration > newest or checkpoint.is_proven:
                continue
            try:
                prove(checkpoint)
            except (DamagedCheckpointError, OSError) as error:
                self.problems.append(
                    f"Checkpoint {checkpoint.path.name} cannot be read back: {error}."
                )
        try:
            prune(stored, self._keep)
        except OSError as error:
            self.problems.append(f"An old checkpoint could not be removed: {error}.")
