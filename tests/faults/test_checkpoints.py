"""Checkpoints resume exactly in their strategy and in others, and damaged checkpoints are detected."""

import pytest

from parakit.artifacts.checkpoints import find_checkpoints
from parakit.artifacts.run import CHECKPOINTS_FOLDER, Status
from parakit.logs.runs import Run
from parakit.reporting.analyse.parity import Curve, last_digit_unit, loss_curve
from tests.faults.runs import SAVE_EVERY, Ended, Kit, same_losses

EVERY = ("baseline", "dp2", "tp2", "sp2", "cp2", "pp2", "vpp2", "zero1", "ep2")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EVERY)
def test_run_with_dropout_resumes_with_identical_losses(kit: Kit, strategy: str) -> None:
    early = kit.train(strategy, ITERS=str(SAVE_EVERY))
    assert early.status.status is Status.OK, early.output
    resumed = kit.resume(early.folder)
    assert resumed.exit_code == 0, resumed.output
    same_losses(resumed.run, kit.whole_curve(strategy))


@pytest.fixture(scope="module")
def checkpointed_tp2_run(kit: Kit) -> Ended:
    return kit.train("tp2", ITERS=str(SAVE_EVERY), DROPOUT="0")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pp2", "cp2", "dp2", "sp2", "baseline"])
def test_tp2_checkpoint_resumes_in_any_strategy_with_the_same_losses(
    kit: Kit, checkpointed_tp2_run: Ended, strategy: str
) -> None:
    resumed = kit.resume(checkpointed_tp2_run.folder, "--strategy", strategy)
    assert resumed.exit_code == 0, resumed.output
    assert resumed.folder != checkpointed_tp2_run.folder
    agree_to_the_printed_digit(resumed.run, kit.whole_curve("tp2", DROPOUT="0"))


@pytest.mark.slow
def test_sharded_optimizer_state_resumes_in_another_sharded_strategy(kit: Kit) -> None:
    alone = {"DROPOUT": "0", "MICRO_BATCH": "1"}
    saved = kit.train("zero1", 4, ITERS=str(SAVE_EVERY), **alone)
    resumed = kit.resume(saved.folder, "--strategy", "tp2dp2-zero1", **alone)
    assert resumed.exit_code == 0, resumed.output
    agree_to_the_printed_digit(resumed.run, kit.whole_curve("zero1", 4, **alone))


def agree_to_the_printed_digit(resumed: Run, whole: Curve) -> None:
    """Assert that losses differ by at most a unit of the last printed digit, up to the last iteration."""
    ours = loss_curve(resumed)
    assert max(ours) == max(whole)
    assert len(ours.keys() & whole.keys()) >= 9
    for number in ours.keys() & whole.keys():
        assert abs(ours[number] - whole[number]) <= 1.01 * last_digit_unit(whole[number])
    assert resumed.restarts == (SAVE_EVERY + 1,)


@pytest.mark.slow
def test_damaged_checkpoint_is_skipped_with_a_message_for_the_previous_one(kit: Kit) -> None:
    early = kit.train("dp2", ITERS="8")
    newest, before = find_checkpoints(early.folder / CHECKPOINTS_FOLDER)
    file = max(newest.path.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\x00\xff" * 64)
    resumed = kit.resume(early.folder)
    assert resumed.exit_code == 0, resumed.output
    output = " ".join(resumed.output.split())
    assert f"{newest.path.name} is passed over: {file.name}" in output
    assert resumed.run.restarts == (before.iteration + 1,)
    same_losses(resumed.run, kit.whole_curve("dp2"))
