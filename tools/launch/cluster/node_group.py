"""The other nodes of a run, as the one that executes its share sees them; usually there are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tools.records.run import StatusRecord


class NodeGroup(Protocol):
    """What a launcher does about the other nodes while its own ranks train."""

    @property
    def cause(self) -> StatusRecord | None:
        """How the run ended, where another node's end was the first cause and no log tells."""
        ...

    def announce(self, folder: Path) -> None:
        """Let them in: the run folder is there, and all may start."""
        ...

    def failure(self) -> str | None:
        """Why this node must stop, if it must; called several times a second."""
        ...

    def hangs(self, stands_still: bool) -> bool:
        """Whether the run hangs, where this node's log has stood still for the timeout or not.

        Megatron prints on its last rank alone, so node 0, whose log receives all lines, is who knows.
        """
        ...

    def stopped(self, own: Sequence[int]) -> Sequence[int]:
        """Once this node's stacks are collected: wait for the others'; the stopped ranks of all."""
        ...

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:
        """Tell how this node ended, wait for the others; the whole run's exit code.

        Args:
            exit_code: torchrun's; anything but 0 if this node did not wait for it.
            error: What the launcher was ended by, if by anything.
        """
        ...


class SingleNode:
    """A run on one machine."""

    cause = None

    def announce(self, folder: Path) -> None:
        """Nobody listens."""

    def failure(self) -> str | None:
        """Nobody fails."""
        return None

    def hangs(self, stands_still: bool) -> bool:
        """This log is all there is."""
        return stands_still

    def stopped(self, own: Sequence[int]) -> Sequence[int]:
        """Nobody else has ranks."""
        return own

    def finish(self, exit_code: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        """Nobody is waited for."""
        return exit_code


SINGLE_NODE = SingleNode()
