"""Recipe switches as choices of a search: which exist, how much each saves, and the printed command."""

import json
import re

import pytest

from parakit.planner.options import PlanOptions
from parakit.planner.recipes import ALL, DEFAULTS, TUNED, list_switches, search_recipes
from tests.planner.conftest import MakeRequest
from tests.program import run_plan as main

WORDS = "--model llama3-8b --gpus 8 --gpu h100 --global-batch 16"


def names(recipe: str, make_request: MakeRequest, model: str, gpu: str) -> set[str]:
    return {switch.name for switch in list_switches(recipe, make_request(model, 8, gpu, 64))}


def test_recipe_switches_depend_on_device_and_model(make_request: MakeRequest) -> None:
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


def test_tuned_plan_is_faster_and_its_command_contains_the_tuning_flags(
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


def test_switch_required_to_fit_reports_saved_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            ["--model", "gpt3-1.3b", "--gpus", "2", "--gpu", "rtx4090", "--recipe", "all", "--json"]
        )
        == 0
    )
    chosen = {switch["name"]: switch for switch in json.loads(capsys.readouterr().out)["recipe"]}
    assert all(switch["saved_bytes"] > 0 for switch in chosen.values() if switch["is_needed"])
    assert chosen["weights kept in fp8"]["is_needed"]


def test_switch_that_saves_no_memory_is_not_needed_if_only_the_replay_counts_gaps() -> None:
    # The replay knows no fused loss: the winner has no gaps with it, and too many without.
    options = PlanOptions(
        model="gpt2-2.5b", gpu="rtx4090", gpus=4, global_batch=128, seq=4096, recipe=TUNED
    )
    plan, chosen = search_recipes(TUNED, options)
    assert plan.winner
    (loss,) = (switch for switch in chosen if "--cross-entropy-loss-fusion" in switch.flags)
    assert loss.saved_bytes == 0
    assert not loss.is_needed


def test_switch_that_makes_room_for_the_gaps_of_the_replay_is_needed() -> None:
    options = PlanOptions(
        model="dense-500m",
        gpu="a100",
        gpus=1,
        global_batch=128,
        recipe=TUNED,
        extra="--vocab-size 128000",
    )
    _, chosen = search_recipes(TUNED, options)
    (loss,) = (switch for switch in chosen if "--cross-entropy-loss-fusion" in switch.flags)
    assert loss.saved_bytes > 0
    assert loss.is_needed


def test_a_plan_above_95_percent_of_the_device_is_not_recommended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "dense-1b", "--gpus", "1", "--gpu", "rtx4090", "--recipe", "all"]) == 1
    sentence = capsys.readouterr().err
    assert "stays within 95% of a device, so none is recommended" in sentence
    assert re.search(r"GiB, 9[5-9]% of the device, which is close: try it \(", sentence)


def test_recipe_is_refused_with_a_named_strategy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS.split(), "--recipe", "tuned", "--strategy", "dp16"]) == 2
    assert (
        "--recipe is of a search; give --strategy its flags with --extra.\n"
        in capsys.readouterr().err
    )
