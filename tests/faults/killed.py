"""A run whose rank 1 is killed, and the same run resumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.runs import Kit, kill


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


def killed(runs: Path, data: Path, *_: object) -> dict[str, Any]:
    """`Killed` of two ranks under DP, killed after the first of three saves."""
    folder = runs / "killed"
    folder.mkdir()
    kit = Kit(folder, data, runs / ".start")
    victim = kit.start("dp2")
    victim.wait_for("iteration        6/")
    kill(victim.ranks[1])
    ended = victim.end()
    iterations = len(ended.run.log.iterations)
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
