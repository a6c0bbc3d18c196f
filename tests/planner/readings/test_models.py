"""Models of published measurements are planned by their names."""

from __future__ import annotations

import dataclasses

import pytest

import parakit
from parakit.config.model import UnknownModelError, find_model, model_from_flags, model_names
from parakit.planner.options import PlanOptions
from parakit.planner.readings.facts import model_facts, source_facts
from parakit.planner.readings.models import (
    SEQUENCE_LENGTH,
    build_published_model,
    find_planned_model,
    has_no_file,
    published_model_names,
)
from parakit.planner.readings.reading_to_spec import build_shape, complete_measurement
from parakit.planner.readings.table import PublishedMeasurement
from parakit.planner.request import build_request
from tests.program import run_plan

PLANNED = [name for name in published_model_names() if "refused" not in model_facts(name)]
NOT_COUNTED = {"load_balancing", "expert_ffn_hidden", "linear", "mamba", "layers"}
"""Fields that mean nothing without experts, without Mamba, or beside the blocks of a hybrid."""


@pytest.mark.parametrize("name", PLANNED)
def test_flags_of_a_published_model_mean_the_shape_that_its_measurements_are_predicted_with(
    name: str,
) -> None:
    stated = PublishedMeasurement(0, "", "", 0.0, model=name, seq=SEQUENCE_LENGTH)
    source = source_facts(stated)
    predicted = build_shape(complete_measurement(stated, source), source)
    planned = build_published_model(name).shape
    if predicted.blocks:
        predicted = dataclasses.replace(predicted, blocks=predicted.blocks * predicted.layers)
    for field in dataclasses.fields(planned):
        if field.name not in NOT_COUNTED or (predicted.experts and not predicted.blocks):
            assert getattr(planned, field.name) == getattr(predicted, field.name), field.name
    if "M" in predicted.blocks:
        assert planned.mamba == predicted.mamba


def test_published_sizes_are_those_of_the_models_names() -> None:
    from parakit.costs import total_parameters

    for name, billions in (("llama3.1-405b", 405.9), ("deepseek-v3", 671), ("mixtral-8x7b", 46.7)):
        parameters = total_parameters(find_planned_model(name).shape)
        assert parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_models_of_the_kit_come_first() -> None:
    for name in set(published_model_names()) & set(model_names()):
        assert find_planned_model(name) == find_model(name)
        assert not has_no_file(find_planned_model(name))


def test_refused_and_unknown_names_are_refused_with_the_way_out() -> None:
    with pytest.raises(UnknownModelError, match=r"deepseek-v4 has sparse .* plan another model"):
        find_planned_model("deepseek-v4")
    with pytest.raises(
        UnknownModelError,
        match=r"no model .deepseekv3.; did you mean deepseek-v3\? To use a model of your own",
    ):
        find_planned_model("deepseekv3")
    with pytest.raises(
        UnknownModelError, match=r"no model 'deepseek'; did you mean deepseek-v[23]"
    ):
        find_planned_model("deepseek")
    with pytest.raises(UnknownModelError, match="no model 'gpt2-lrge'; did you mean gpt2-large"):
        find_planned_model("gpt2-lrge")


def test_plan_and_estimate_take_a_published_name_and_its_sequence_length() -> None:
    request = build_request(PlanOptions(model="mixtral-8x7b", gpus=64, gpu="h100", seq=8192))
    assert request.template.shape.seq_length == 8192
    planned = parakit.estimate("llama2-13b", "tp2dp4-zero1", gpu="h100", global_batch=64)
    assert planned.request.model.name == "llama2-13b"


def test_plan_prints_the_flags_that_training_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(["--model", "llama2-13b", "--strategy", "tp2dp4", "--gpu", "h100"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "write these flags to llama2-13b.args: --num-layers 40 --hidden-size 5120" in printed
    assert "parakit train-tp2dp4-llama2-13b-8gpu" in printed
    assert "--model llama2-13b.args" in printed


def test_flags_of_a_published_model_are_a_models_file() -> None:
    model = build_published_model("qwen3-30b-a3b")
    assert model_from_flags("copy", "moe", model.flags).shape == model.shape
