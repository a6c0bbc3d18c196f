"""kill -9 of a rank, of torchrun, of the launcher and of the supervisor between them."""

import random
import signal
import sys
import time
from pathlib import Path

import pytest

from parakit.artifacts.checkpoints import find_checkpoints
from parakit.artifacts.run import CHECKPOINTS_FOLDER, LOG_FILE, Status, StatusRecord, read_status
from parakit.launch.compose import torchrun_command
from parakit.launch.supervise.exit_status import classify_exit
from parakit.launch.supervise.ranks import RankProcesses
from parakit.logs.runs import load_folder
from parakit.reporting.analyse.parity import loss_curve
from tests.examples.runs import SharedRuns
from tests.faults.killed import Killed
from tests.faults.runs import ITERATIONS, SAVE_EVERY, WHO, Ended, Kit, kill, moment, same_losses
from tests.patience import OF_A_RUN, until

STRATEGIES = ("dp2", "tp2", "sp2", "cp2", "pp2", "zero1")


@pytest.fixture
def killed(shared_runs: SharedRuns) -> Killed:
    return Killed(**shared_runs.scenario("killed"))


@pytest.fixture
def undisturbed(shared_runs: SharedRuns) -> Path:
    """Return the folder of the same run without a fault."""
    return shared_runs.runs["undisturbed"].folder


def struck(kit: Kit, strategy: str, who: str, line: str, pause: float) -> Ended:
    victim = kit.start(strategy)
    victim.wait_for(line)
    time.sleep(pause)
    kill(victim.processes[who])
    return victim.end()


def judged_rightly(status: StatusRecord, who: str) -> None:
    if who == "launcher":
        assert (status.status, "launcher was killed" in status.reason) == (Status.INTERRUPTED, True)
    elif who.startswith("rank"):
        assert status.status is Status.CRASHED
        assert status.reason.startswith(f"Rank {who[-1]} was killed by SIGKILL")
        assert status.rank == int(who[-1])
    elif who == "torchrun":
        assert status.reason.startswith("torchrun was killed by SIGKILL")
    else:
        assert status.status is Status.CRASHED
        assert status.reason.startswith("The supervisor of torchrun was killed by SIGKILL")


def test_resume_after_a_killed_rank_gives_the_losses_of_an_undisturbed_run(
    killed: Killed, undisturbed: Path
) -> None:
    folder = Path(killed.folder)
    judged_rightly(read_status(folder / "attempts" / "1"), "rank 1")
    assert killed.iterations_reported
    assert (killed.exit_code, killed.resumed_folder) == (0, killed.folder), killed.output
    resumed = load_folder(folder)
    assert read_status(folder).status is Status.OK
    # On a busy machine the kill comes late, so more than the first of three saves may exist.
    assert killed.saved_iteration in range(SAVE_EVERY, ITERATIONS, SAVE_EVERY)
    assert resumed.restarts == (killed.saved_iteration + 1,)
    same_losses(resumed, loss_curve(load_folder(undisturbed)))


def test_torchrun_stops_the_other_ranks_and_names_the_killed_rank(tmp_path: Path) -> None:
    rank = "[ $RANK = 0 ] || kill -9 $BASHPID; exec sleep 3600"
    command = (*torchrun_command(2, sys.executable), "--no-python", "bash", "-c", rank)
    with RankProcesses(command, {}, tmp_path / LOG_FILE) as ranks:
        until(lambda: ranks.exit_code() is not None, "torchrun has not ended", OF_A_RUN)
        code = ranks.exit_code()
    judged_rightly(classify_exit(tmp_path, code, interrupted=False), "rank 1")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_that_was_asked_to_stop_can_be_resumed(kit: Kit, number: signal.Signals) -> None:
    victim = kit.start("dp2")
    victim.wait_for("iteration        6/")
    victim.launcher.send_signal(number)
    ended = victim.end()
    assert (ended.exit_code, ended.status.status) == (130, Status.INTERRUPTED)
    resumed = kit.resume(ended.folder)
    assert resumed.exit_code == 0, resumed.output
    same_losses(resumed.run, kit.whole_curve("dp2"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_run_can_be_resumed_after_any_process_is_killed_at_any_time(kit: Kit, seed: int) -> None:
    choose = random.Random(1000 + seed)
    strategy, who = STRATEGIES[seed % len(STRATEGIES)], choose.choice(WHO)
    ended = struck(kit, strategy, who, *moment(seed))
    if ended.status.status is not Status.OK:  # The run may have ended before the kill.
        judged_rightly(ended.status, who)
    assert ended.run.log.iterations
    stored = find_checkpoints(ended.folder / CHECKPOINTS_FOLDER)
    finished = [checkpoint.iteration for checkpoint in stored if checkpoint.is_finished]
    resumed = kit.resume(ended.folder)
    if "set ITERS= above" in resumed.output:  # The last checkpoint existed already.
        assert finished[0] == ITERATIONS
        return
    if not finished:  # The kill came during the first save.
        assert (resumed.exit_code, "start the run again" in resumed.output) == (2, True)
        return
    assert resumed.exit_code == 0, resumed.output
    same_losses(resumed.run, kit.whole_curve(strategy))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["rank 1", "torchrun", "launcher", "supervisor"])
def test_run_killed_before_its_first_checkpoint_cannot_be_resumed(kit: Kit, who: str) -> None:
    ended = struck(kit, "tp2", who, "initializing torch distributed", 0.0)
    judged_rightly(ended.status, who)
    refused = kit.resume(ended.folder)
    assert refused.exit_code == 2
    assert "holds no checkpoint" in " ".join(refused.output.split())
