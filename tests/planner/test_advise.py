"""The further answers of `make plan ALL=1`: each follows from the planner's figures for the devices in question."""

from dataclasses import replace

import pytest

from parakit.planner.advice import StrategyFamily, find_best_of_each_family
from parakit.planner.advise import _answer_megatron, _describe_unchanged, answer_questions
from parakit.planner.request import build_request
from parakit.planner.search import search_configurations
from tests.given import asked_of_plan
from tests.program import run_plan as main


def advised(*arguments: str) -> dict[str, str]:
    plan = search_configurations(build_request(asked_of_plan(arguments)))
    answers = answer_questions(plan)
    assert len(answers) == 8
    return answers


def test_a_model_that_one_device_holds_needs_no_megatron() -> None:
    answers = advised("--model", "gpt2-large", "--gpus", "2")
    assert "make train-dp2-zero1-gpt2-large-2gpu" not in " ".join(answers.values())
    assert answers["Megatron for this?"].startswith(
        "Not needed: PyTorch's DDP and FSDP and DeepSpeed"
    )
    assert answers["One device"].startswith("One device is enough")
    assert "zero2's" not in answers["Second"], "another sharding is not another choice"
    assert "need 1 device." in answers["For inference"]


def test_megatron_is_recommended_for_a_model_that_data_parallelism_cannot_hold() -> None:
    answers = advised("--model", "gpt3-175b", "--gpus", "64", "--gpu", "a100-80g")
    assert answers["Megatron for this?"].startswith("Yes: ")
    assert "does not fit" in answers["Avoid"]
    assert "pipeline bubble is" in answers["Micro batches"]


def test_one_device_has_no_alternatives() -> None:
    replies = advised("--model", "gpt2-large", "--gpus", "1")
    assert replies["Avoid"] == "Nothing: one device has no alternatives."


def test_all_prints_every_answer_below_the_first_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--model", "gpt2-large", "--gpus", "2")
    assert main([*arguments, "--all"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    screen, _, tables = printed.partition("The fastest of ")
    assert "Run it" in screen
    for name, answer in advised(*arguments).items():
        assert f"{name} {' '.join(answer.split())}" in tables


def test_impossible_request_gives_a_single_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "gpt2-large", "--gpus", "2", "--gpu", "h1000"]) == 2
    assert "There is no GPU 'h1000'" in capsys.readouterr().err
    assert main(["--model", "gpt3-1t", "--gpus", "2"]) == 1
    assert "does not fit on 2" in capsys.readouterr().err


@pytest.mark.parametrize(("ratio", "verdict"), [(1.05, "Hardly: "), (1.2, "Yes: ")])
def test_a_gain_within_the_errors_of_predictions_is_hardly_worth_megatron(
    ratio: float, verdict: str
) -> None:
    plan = search_configurations(
        build_request(asked_of_plan(("--model", "gpt2-large", "--gpus", "2")))
    )
    best = find_best_of_each_family(plan.request)
    winner, other = best[StrategyFamily.TENSOR], best[StrategyFamily.SHARDED_DATA]
    matmul = ratio * winner.seconds.total - other.seconds.total + other.seconds.matmul
    slow = replace(other, seconds=replace(other.seconds, matmul=matmul))
    answer = _answer_megatron(winner, {StrategyFamily.SHARDED_DATA: slow}, plan)
    assert answer.startswith(verdict)
    assert f"takes {ratio:.2f} times as long" in answer


def test_a_pipeline_with_fewer_micro_batches_than_stages_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(("--model", "gpt2-large", "--gpus", "2", "--all")) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "pp2 (1 micro batch) has fewer micro batches than stages, so stages idle." in screen
    assert "Each kind is used alone, at its best micro batch and schedule." in screen


@pytest.mark.parametrize("arguments", [(), ("--global-batch", "128")])
def test_an_assumed_global_batch_is_named(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("--model", "gpt2-large", "--gpus", "2", *arguments)) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assumption = "(the batch of the model's file)"
    assert (assumption in screen) == (not arguments)


def test_changes_that_leave_the_choice_the_same_are_listed_as_separate_changes() -> None:
    assert _describe_unchanged(["twice the devices"]) == (
        "The choice stays the same with twice the devices."
    )
    assert _describe_unchanged(["twice the devices", "a global batch of 8"]) == (
        "Each of these changes alone leaves the choice the same: twice the devices and a global batch of 8."
    )
