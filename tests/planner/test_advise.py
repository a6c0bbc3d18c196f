"""The further answers of `make plan ALL=1`: each follows from the planner's figures for the devices in question."""

from dataclasses import replace
from functools import cache

import pytest

from parakit.planner.advice import StrategyFamily, find_best_of_each_family
from parakit.planner.advise import _answer_megatron, _describe_unchanged, answer_questions
from parakit.planner.request import build_request
from parakit.planner.search import Plan, search_configurations
from tests.given import asked_of_plan
from tests.planner.printed import print_plan

GPT2_LARGE = "--model gpt2-large --gpus 2"


@cache
def search_plan(arguments: str) -> Plan:
    return search_configurations(build_request(asked_of_plan(arguments.split())))


def advised(arguments: str) -> dict[str, str]:
    answers = answer_questions(search_plan(arguments))
    assert len(answers) == 8
    return answers


def test_a_model_that_one_device_holds_needs_no_megatron() -> None:
    answers = advised(GPT2_LARGE)
    assert "make train-dp2-zero1-gpt2-large-2gpu" not in " ".join(answers.values())
    assert answers["Megatron for this?"].startswith(
        "Not needed: PyTorch's DDP and FSDP and DeepSpeed"
    )
    assert answers["One device"].startswith("One device is enough")
    assert "zero2's" not in answers["Second"], "another sharding is not another choice"
    assert "need 1 device." in answers["For inference"]


def test_megatron_is_recommended_for_a_model_that_data_parallelism_cannot_hold() -> None:
    answers = advised("--model gpt3-13b --gpus 16 --gpu rtx4090 --global-batch 16")
    assert answers["Megatron for this?"].startswith("Yes: ")
    assert "does not fit" in answers["Avoid"]
    assert "pipeline bubble is" in answers["Micro batches"]


def test_one_device_has_no_alternatives() -> None:
    replies = advised("--model gpt2-large --gpus 1")
    assert replies["Avoid"] == "Nothing: one device has no alternatives."


def test_all_prints_every_answer_below_the_first_screen() -> None:
    printed = " ".join(print_plan(f"{GPT2_LARGE} --all").split())
    screen, _, tables = printed.partition("The fastest of ")
    assert "Run it" in screen
    for name, answer in advised(GPT2_LARGE).items():
        assert f"{name} {' '.join(answer.split())}" in tables


@pytest.mark.parametrize(("ratio", "verdict"), [(1.05, "Hardly: "), (1.2, "Yes: ")])
def test_a_gain_within_the_errors_of_predictions_is_hardly_worth_megatron(
    ratio: float, verdict: str
) -> None:
    plan = search_plan(GPT2_LARGE)
    best = find_best_of_each_family(plan.request)
    winner, other = best[StrategyFamily.TENSOR], best[StrategyFamily.SHARDED_DATA]
    matmul = ratio * winner.seconds.total - other.seconds.total + other.seconds.matmul
    slow = replace(other, seconds=replace(other.seconds, matmul=matmul))
    answer = _answer_megatron(winner, {StrategyFamily.SHARDED_DATA: slow}, plan)
    assert answer.startswith(verdict)
    assert f"takes {ratio:.2f} times as long" in answer


def test_a_pipeline_with_fewer_micro_batches_than_stages_is_named() -> None:
    printed = " ".join(print_plan(f"{GPT2_LARGE} --all").split())
    assert "pp2 (1 micro batch) has fewer micro batches than stages, so stages idle." in printed
    assert "Each kind is used alone, at its best micro batch and schedule." in printed


def test_changes_that_leave_the_choice_the_same_are_listed_as_separate_changes() -> None:
    assert _describe_unchanged(["twice the devices"]) == (
        "The choice stays the same with twice the devices."
    )
    assert _describe_unchanged(["twice the devices", "a global batch of 8"]) == (
        "Each of these changes alone leaves the choice the same: twice the devices and a global batch of 8."
    )
