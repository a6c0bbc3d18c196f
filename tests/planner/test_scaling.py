"""Plans on several numbers of devices show where scaling bends, why, and what failures cost."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest

from parakit.planner.options import PlanOptions
from parakit.planner.scaling import (
    Failures,
    ScalePoint,
    ScalingResult,
    compare_points,
    describe_bend,
    plan_scaling,
)
from tests.program import run_plan as main

LLAMA_3_HOURS = 16_384 * 54 * 24 / 419
"""GPU hours per interruption of Llama 3's training (arXiv:2407.21783 section 3.3.4)."""


@pytest.fixture(scope="module")
def scaled() -> ScalingResult:
    options = PlanOptions("gpt3-1.3b", "h100", global_batch=64)
    return plan_scaling(options, (16, 2, 4), Failures(LLAMA_3_HOURS, 60.0, 600.0))


def test_points_are_sorted_and_share_the_batch(scaled: ScalingResult) -> None:
    assert [point.devices for point in scaled.points] == [2, 4, 16]
    for point in scaled.points:
        assert point.result is not None
        assert point.result.plan.request.global_batch == 64


def test_efficiency_is_per_doubling_within_its_range(scaled: ScalingResult) -> None:
    first, second = scaled.doublings
    for doubling in (first, second):
        assert doubling.interval is not None
        low, high = doubling.interval
        assert low < doubling.efficiency < high
    before, after = second.before.tokens_per_second, second.after.tokens_per_second
    assert before is not None
    assert after is not None
    # 4 to 16 devices are two doublings.
    assert second.efficiency == pytest.approx(sqrt(after / before / 4))


def test_bend_is_named_with_the_component_that_grows(scaled: ScalingResult) -> None:
    before, after = scaled.points[0], scaled.points[1]
    assert after.result is not None
    winner = after.result.winner
    slow = replace(winner.seconds, gradient_sync=winner.seconds.gradient_sync + 10.0)
    slowed = replace(winner, seconds=slow, tokens_per_second=winner.tokens_per_second / 5)
    plan = replace(after.result.plan, ranked=(slowed,))
    bent = replace(after, result=replace(after.result, plan=plan))
    sentence = describe_bend([compare_points(before, bent)])
    assert sentence.startswith("Scaling bends between 2 and 4 GPUs")
    assert "The reason is gradient synchronisation, which grows from" in sentence
    assert "does not bend" in describe_bend([compare_points(before, before_twice(scaled))])


def before_twice(scaled: ScalingResult) -> ScalePoint:
    """Return the first point on twice the devices, with twice the throughput."""
    first = scaled.points[0]
    assert first.result is not None
    winner = first.result.winner
    fast = replace(winner, tokens_per_second=2 * winner.tokens_per_second)
    plan = replace(first.result.plan, ranked=(fast,))
    return replace(first, devices=2 * first.devices, result=replace(first.result, plan=plan))


def test_best_interval_of_checkpoints_is_youngs_with_dalys_correction() -> None:
    failures = Failures(LLAMA_3_HOURS, 60.0, 600.0)
    mtbf = failures.job_mtbf_seconds(16_384)
    assert mtbf == pytest.approx(54 * 24 * 3600 / 419)
    young = sqrt(2 * 60.0 * mtbf)
    assert failures.best_interval_seconds(16_384) == pytest.approx(young - 60 + 20, rel=0.01)


def test_no_other_interval_has_a_better_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = Failures(LLAMA_3_HOURS, 60.0, 600.0)
    best, interval = failures.goodput(16_384), failures.best_interval_seconds(16_384)
    for factor in (0.5, 0.8, 1.25, 2.0):
        other = factor * interval
        monkeypatch.setattr(Failures, "best_interval_seconds", lambda *_, other=other: other)
        assert failures.goodput(16_384) < best


def test_goodput_falls_with_devices_and_is_0_if_a_job_never_restarts() -> None:
    failures = Failures(LLAMA_3_HOURS, 60.0, 600.0)
    assert 1 > failures.goodput(1024) > failures.goodput(16_384) > 0.8
    assert Failures(0.001, 60.0, 600.0).goodput(16_384) == 0.0


def test_command_prints_a_table_and_draws_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "scaling.svg"
    arguments = ["--model", "gpt2-large", "--gpu", "h100", "--gpus", "1,2", "--global-batch", "8"]
    assert main([*arguments, "--mtbf", "50000", "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "kept per doubling" in printed
    assert "goodput" in printed
    assert picture.read_text().startswith("<?xml")
    assert main([*arguments, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["gpus"] for point in points] == [1, 2]


def test_failures_of_a_single_number_of_devices_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "gpt2-large", "--gpus", "8", "--mtbf", "50000"]) == 2
    assert "is of several numbers of devices" in capsys.readouterr().err


def test_strategy_and_several_numbers_contradict_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", "gpt2-large", "--gpus", "2,4", "--strategy", "dp2"]
    assert main(arguments) == 2
    assert "leave --strategy and --nodes out" in capsys.readouterr().err
