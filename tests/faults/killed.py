"""A run whose rank 1 is killed, and the same run resumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.examples.forked_launcher import forked
from tests.faults.conftest import Kit, kill
from tools.launch.verifier import ForkedRanks


@dataclass(frozen=True)
class Killed:
    """What was found."""

    folder: str
    """Of the resumed run; its first attempt is what the kill left."""
    iterations_reported: int
    """By the report, before the run was resumed."""
    resumed_folder: str
    exit_code: int
    """Of the launcher that resumed it."""
    output: str


def killed(runs: Path, data: Path, ranks: ForkedRanks) -> dict[str, Any]:
    """`Killed` of two ranks under DP, killed after the first of three saves.

    torchrun started them; those that resume are forked.
    """
    folder = runs / "killed"
    folder.mkdir()
    kit = Kit(folder, data, runs / ".start")
    victim = kit.start("dp2")
    victim.wait_for("iteration        6/")
    kill(victim.ranks[1])
    ended = victim.end()
    iterations = len(ended.run.log.iterations)
    kit.program = forked(ranks)
    resumed = kit.resume(ended.folder)
    return asdict(
        Killed(
            str(ended.folder),
            iterations,
            str(resumed.folder),
            resumed.exit_code,
            resumed.output,
        )
    )
