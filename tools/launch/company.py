"""The other nodes of a run, as the one that executes its share sees them; usually there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Company(Protocol):
    """What a launcher does about the other nodes while its own ranks train."""

    @property
    def cause(self) -> str | None:
        """Why the run ended, where another node vanished and no log tells."""
        ...

    def announce(self, folder: Path) -> None:
        """Let them in: the run folder is there, and all may start."""
        ...

    def failure(self) -> str | None:
        """Why this node must stop, if it must; called several times a second."""
        ...

    def finish(self, exit_code: int) -> int:
        """Tell how this node ended, wait for the others; the whole run's exit code."""
        ...


class Alone:
    """A run on one machine."""

    cause = None

    def announce(self, folder: Path) -> None:
        """Nobody listens."""

    def failure(self) -> str | None:
        """Nobody fails."""
        return None

    def finish(self, exit_code: int) -> int:
        """Nobody is waited for."""
        return exit_code


ALONE = Alone()
