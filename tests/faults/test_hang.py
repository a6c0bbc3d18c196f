"""A stalled rank is detected and named, and the stacks of all ranks are stored."""

import time
from math import ceil

import pytest

from parakit.artifacts import run as records
from parakit.artifacts.run import Status
from tests.faults.runs import Kit, same_losses

LONG = {"ITERS": "60", "SAVE_EVERY": "20"}
"""Variables of a run that still trains while this test looks for its processes.

On a calm machine the twelve iterations of other tests end before a rank can be stopped.
"""


def longer_than_any_start(kit: Kit, strategy: str) -> int:
    """Return seconds for which a healthy run is never silent on this machine: twice the time of a full run."""
    whole = kit.undisturbed_run(strategy, ITERS=LONG["ITERS"]).status.wall_seconds
    return max(25, ceil(2 * (whole or 0)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp2", "pp2"])
def test_stopped_rank_is_named_with_stacks_and_the_run_can_be_resumed(
    kit: Kit, strategy: str
) -> None:
    seconds = longer_than_any_start(kit, strategy)
    victim = kit.start(strategy, HANG_TIMEOUT=str(seconds), **LONG)
    victim.wait_for("iteration       22/")
    victim.ranks[1].suspend()
    ended = victim.end()
    status = ended.status
    assert (status.status, status.rank) == (Status.CRASHED, 1)
    assert f"nothing was logged for {seconds} s. Rank 1 " in status.reason
    assert "was stopped by a signal" in status.reason
    stacks = ended.folder / records.STACKS_FOLDER
    rank_files = ("rank0.pkl", "rank0.txt", "rank1.pkl", "rank1.txt")
    stack_files = [records.ASKED_FILE, *rank_files, records.STOPPED_FILE]
    assert sorted(path.name for path in stacks.iterdir()) == stack_files
    assert all("train" in path.read_text() for path in stacks.glob("rank*.txt"))
    assert ended.run.log.iterations
    resumed = kit.resume(ended.folder, ITERS=LONG["ITERS"])
    assert resumed.exit_code == 0, resumed.output
    same_losses(resumed.run, kit.whole_curve(strategy, ITERS=LONG["ITERS"]))


@pytest.mark.slow
def test_run_that_only_pauses_is_not_stopped(kit: Kit) -> None:
    seconds = longer_than_any_start(kit, "dp2")
    victim = kit.start("dp2", HANG_TIMEOUT=str(seconds), **LONG)
    victim.wait_for("iteration       22/")
    stopped = victim.ranks[0]
    stopped.suspend()
    time.sleep(5)
    stopped.resume()
    ended = victim.end()
    assert (ended.exit_code, len(ended.run.log.iterations)) == (0, int(LONG["ITERS"]))
