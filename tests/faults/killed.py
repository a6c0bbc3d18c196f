"""Scenario: a run whose rank 1 is killed, and the resumed run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from parakit.artifacts.checkpoints import find_checkpoints
from parakit.artifacts.run import CHECKPOINTS_FOLDER
from parakit.experiments.verify.verifier import ForkedRanks
from tests.examples.forked_launcher import forked
from tests.faults.runs import Kit, kill


@dataclass(frozen=True)
class Killed:
    """Results of the killed and the resumed run."""

    folder: str
    """Folder of the resumed run, whose first attempt was killed."""
    iterations_reported: int
    """Number of iterations in the report before the run was resumed."""
    saved_iteration: int
    """Iteration of the newest finished checkpoint of the killed run."""
    resumed_folder: str
    exit_code: int
    """Exit code of the launcher that resumed the run."""
    output: str


def killed(runs: Path, data: Path, ranks: ForkedRanks) -> dict[str, Any]:
    """Return `Killed` for two forked DP ranks, killed after a save that is not the last."""
    folder = runs / "killed"
    folder.mkdir()
    kit = Kit(folder, data, runs / ".start")
    kit.program = forked(ranks)
    # The script of a target would start another launcher, which forks no ranks.
    victim = kit.start("dp2", arguments=("run", "dp2", "gpt2-tiny", "2cpu"))
    victim.wait_for("iteration        6/")
    kill(_rank_1(ranks))
    ended = victim.end()
    iterations = len(ended.run.log.iterations)
    stored = find_checkpoints(
        ended.folder / CHECKPOINTS_FOLDER
    )  # Checkpoints are sorted from the newest.
    saved = next(checkpoint.iteration for checkpoint in stored if checkpoint.is_finished)
    resumed = kit.resume(ended.folder)
    return asdict(
        Killed(
            str(ended.folder),
            iterations,
            saved,
            str(resumed.folder),
            resumed.exit_code,
            resumed.output,
        )
    )


def _rank_1(ranks: ForkedRanks) -> psutil.Process:
    processes = psutil.Process(ranks.warm.pid).children(recursive=True)
    (victim,) = (process for process in processes if process.name() == "rank1")
    return victim
