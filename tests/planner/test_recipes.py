"""Switches of recipes as choices of a search: which there are, what each brings, and the command."""

import json
import re

import pytest

from parakit.planner.recipes import ALL, DEFAULTS, TUNED, list_switches
from tests.planner.conftest import MakeRequest
from tests.program import run_plan as main

WORDS = "--model llama3-8b --gpus 16 --gpu h100 --global-batch 64"


def names(recipe: str, make_request: MakeRequest, model: str, gpu: str) -> set[str]:
    return {switch.name for switch in list_switches(recipe, make_request(model, 8, gpu, 64))}


def test_a_device_and_a_model_have_their_switches(make_request: MakeRequest) -> None:
    dense = names(ALL, make_request, "llama3-8b", "a100")
    assert "gradients reduced in bf16" in dense
    assert not {"fp8 products", "weights kept in fp8", "DeepEP"} & dense
    mixture = names(ALL, make_request, "mixtral-8x7b", "b200")
    assert {"fp8 products", "weights kept in fp8", "DeepEP"} <= mixture
    assert names(TUNED, make_request, "mixtral-8x7b", "b200") < mixture
    assert not names(DEFAULTS, make_request, "llama3-8b", "h100")
    assert not names(ALL, make_request, "moe-tiny", "cpu")
    # It says itself how it multiplies, and what needs the switch goes with it.
    assert not {"fp8 products", "weights kept in fp8"} & names(
        ALL, make_request, "llama3-8b-fp8", "h100"
    )


def test_a_tuned_plan_is_faster_and_its_command_has_the_flags_that_make_it_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = {}
    for recipe in (DEFAULTS, TUNED, ALL):
        assert main([*WORDS.split(), "--recipe", recipe, "--json"]) == 0
        plans[recipe] = json.loads(capsys.readouterr().out)
    seconds = [plans[recipe]["winner"]["iteration_seconds"] for recipe in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert plans[DEFAULTS]["recipe"] == []
    for recipe in (TUNED, ALL):
        winner, chosen = plans[recipe]["winner"], plans[recipe]["recipe"]
        assert chosen
        for switch in chosen:
            assert " ".join(switch["flags"]) in winner["command"]
            assert switch["saves"] > 0 or switch["saved_bytes"] > 0
        assert ("--tp-comm-overlap" in winner["command"]) == winner["strategy"].startswith("sp")
    assert "--fp8-format" in plans[ALL]["winner"]["command"]


def test_a_switch_that_a_plan_needs_to_fit_is_not_said_to_need_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            ["--model", "gpt3-1.3b", "--gpus", "2", "--gpu", "rtx4090", "--recipe", "all", "--json"]
        )
        == 0
    )
    chosen = {each["name"]: each for each in json.loads(capsys.readouterr().out)["recipe"]}
    assert all(each["saved_bytes"] > 0 for each in chosen.values() if each["is_needed"])
    assert chosen["weights kept in fp8"]["is_needed"]


def test_a_plan_above_95_percent_of_the_device_is_not_recommended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "dense-1b", "--gpus", "1", "--gpu", "rtx4090", "--recipe", "all"]) == 1
    sentence = capsys.readouterr().err
    assert "stays within 95% of a device, so none is recommended" in sentence
    assert re.search(r"GiB, 9[5-9]% of the device, which is close: try it \(", sentence)


def test_a_strategys_switches_are_said_with_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS.split(), "--recipe", "tuned", "--strategy", "dp16"]) == 2
    assert "RECIPE= is of a search" in capsys.readouterr().err
