"""The fixes of Megatron's history: each can be run, or says why not; what is a fix that is as stated."""

import pytest

from parakit.artifacts.capture import CaptureStage
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.config.setting import SettingError
from parakit.launch.job import parse_target
from tests.verify.history import Fix, fixes, verify_history


def test_every_fix_is_run_in_a_layout_that_exists_or_says_why_not() -> None:
    assert len({fix.commit for fix in fixes()}) == len(fixes())
    for fix in fixes():
        assert bool(fix.not_run) is not bool(fix.strategy), fix.commit
        assert fix.stage in {"", *CaptureStage}
        if fix.strategy:
            target = f"train-{fix.strategy}-{fix.model}-{fix.devices}cpu"
            assert parse_target(target).flags is not None


def test_a_fix_is_seen_where_it_is_stated_or_by_the_error_that_ends_the_run() -> None:
    wrong = VerifyVerdict(VerifyOutcome.DIFFERS, stage=CaptureStage.OUTPUTS, module="decoder")
    ended = VerifyVerdict(VerifyOutcome.NOT_COMPARABLE, reason="The strategy ended: sizes differ")
    stated = {"commit": "a", "pull": 1, "says": "b", "stage": CaptureStage.OUTPUTS}
    assert Fix(**stated, module="decoder").is_seen(wrong)
    assert not Fix(**stated, module="embedding").is_seen(wrong)
    assert not Fix(**stated, module="decoder").is_seen(ended)
    assert Fix(**stated, fails="sizes differ").is_seen(ended)


def test_a_fix_holds_if_its_parents_fault_is_gone_though_the_log_has_another_one() -> None:
    held = VerifyVerdict(VerifyOutcome.HELD)
    wrong = VerifyVerdict(VerifyOutcome.DIFFERS, stage=CaptureStage.OUTPUTS, module="decoder")
    logged = VerifyVerdict(VerifyOutcome.DIFFERS, stage=CaptureStage.LOG, module="z_loss")
    fix = Fix("a", 1, "b", stage=CaptureStage.OUTPUTS)
    assert [fix.is_gone(verdict) for verdict in (held, wrong, logged)] == [True, False, True]
    assert not Fix("a", 1, "b", stage=CaptureStage.LOG).is_gone(logged)


def test_history_needs_a_clone() -> None:
    with pytest.raises(SettingError, match="set MEGATRON_LM= to a whole clone"):
        verify_history(None)
