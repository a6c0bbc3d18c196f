"""The answers of `make plan`: each follows from the planner's figures for the devices in question."""

import json

import pytest

from parakit.planner.advise import answer_questions
from parakit.planner.request import build_request
from parakit.planner.search import search_configurations
from tests.given import asked_of_plan
from tests.program import run_plan as main


def advised(*words: str) -> dict[str, str]:
    plan = search_configurations(build_request(asked_of_plan(words)))
    found = answer_questions(plan)
    assert len(found) == 10
    return found


def test_a_model_that_one_device_holds_needs_no_megatron() -> None:
    found = advised("--model", "gpt2-large", "--gpus", "2")
    assert "make train-dp2-zero1-gpt2-large-2gpu" not in " ".join(found.values())
    assert found["Megatron for this?"].startswith(
        "Not needed: PyTorch's DDP and FSDP and DeepSpeed"
    )
    assert found["One device"].startswith("One device is enough")
    assert "zero2's" not in found["Second"], "another sharding is not another choice"
    assert "need 1 device." in found["For inference"]


def test_a_model_that_data_parallelism_cannot_hold_is_worth_megatron() -> None:
    found = advised("--model", "gpt3-175b", "--gpus", "64", "--gpu", "a100-80g")
    assert found["Megatron for this?"].startswith("Yes: ")
    assert "does not fit" in found["Avoid"]
    assert "pipeline bubble is" in found["Micro batches"]


def test_what_would_change_the_choice_is_looked_for() -> None:
    found = advised("--model", "gpt3-13b", "--gpus", "8", "--gpu", "h100")
    assert "half the memory" in found["What would change it"]
    assert "a quarter of nvlink4's rate" in found["What would change it"]


def test_one_device_has_no_alternatives() -> None:
    replies = advised("--model", "gpt2-large", "--gpus", "1")
    assert replies["Avoid"] == "Nothing: one device has no alternatives."


def test_a_plan_prints_every_answer_and_its_json_none(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "gpt2-large", "--gpus", "2")
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("Use dp2-zero1: data parallelism over 2 ranks")
    for name, answer in advised(*arguments).items():
        assert f"{name} {' '.join(answer.split())}" in printed
    assert main([*arguments, "--json"]) == 0
    assert "Megatron for this?" not in json.loads(capsys.readouterr().out)


def test_what_cannot_be_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "gpt2-large", "--gpus", "2", "--gpu", "h1000"]) == 2
    assert "There is no GPU 'h1000'" in capsys.readouterr().err
    assert main(["--model", "gpt3-1t", "--gpus", "2"]) == 1
    assert "does not fit on 2" in capsys.readouterr().err
