"""A model's tensors by its dimensions, against those that Megatron 0.19 stores and against the planner's counts.

`megatron_tensors.json` holds names and shapes from `sharded_state_dict` of Megatron's GPTModel with local layers,
for the flags that stand beside them.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from parakit.artifacts.torch_dist import OUTPUT, Shape, StoredMetadata, StoredTensor
from parakit.checkpoint.contents import TORCH_DIST, Contents
from parakit.checkpoint.model_comparison import compare_with_model
from parakit.checkpoint.model_tensors import is_described, list_model_tensors
from parakit.config.flags import Flags
from parakit.config.model import ModelShape, load_model, model_names, shape_from_flags
from parakit.costs import total_parameters

CASES: dict[str, Any] = json.loads(Path(__file__).with_name("megatron_tensors.json").read_text())


def shape_of(case: str) -> ModelShape:
    flags = CASES[case]["flags"].split()
    return shape_from_flags(case, Flags(flags))


def stored(case: str) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in CASES[case]["tensors"].items()}


def holding(shapes: Mapping[str, Shape]) -> Contents:
    tensors = {name: StoredTensor(shape, "float32", {}, {}) for name, shape in shapes.items()}
    return Contents(
        Path("checkpoint"), TORCH_DIST, 8, {}, StoredMetadata(tensors, (), {}), (), problems=()
    )


def problems(case: str, shapes: Mapping[str, Shape]) -> str:
    return " ".join(compare_with_model(holding(shapes), shape_of(case)).problems)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_that_megatron_stores_is_compared_and_fits(case: str) -> None:
    comparison = compare_with_model(holding(stored(case)), shape_of(case))
    assert comparison.problems == ()
    assert comparison.compared_names == stored(case).keys()


@pytest.mark.parametrize("case", CASES)
def test_each_missing_tensor_is_named(case: str) -> None:
    optional = ("router.bias", "router.expert_bias")
    for name in stored(case):
        shapes = {other: shape for other, shape in stored(case).items() if other != name}
        if not name.endswith(optional):
            assert f"{name} is missing" in problems(case, shapes)


@pytest.mark.parametrize("case", CASES)
def test_each_tensor_of_another_shape_is_named(case: str) -> None:
    """Half of the experts, or of any other first dimension."""
    for name, (rows, *columns) in stored(case).items():
        if name in ("embedding.word_embeddings.weight", OUTPUT):
            continue  # Their rows are compared with the padded vocabulary of the arguments.
        halved = {**stored(case), name: (rows * 2, *columns)}
        assert f"{name} has the shape" in problems(case, halved)


def test_a_tensor_of_another_model_is_left_over() -> None:
    foreign = {
        "decoder.layers.self_attention.q_layernorm.weight": (2, 8),
        "decoder.layers.mlp.router.weight": (2, 4, 32),
        "decoder.layers.self_attention.core_attention.softmax_offset": (2, 4),
        "mtp.layers.0.eh_proj.weight": (32, 64),
    }
    for name, shape in foreign.items():
        assert f"{name} is left over" in problems("gpt2", {**stored("gpt2"), name: shape})


def test_a_dense_layer_with_experts_is_at_fault() -> None:
    name = "decoder.layers.0.mlp.router.weight"
    shapes = {**stored("deepseek_v3"), name: (4, 32)}
    assert f"{name} is left over" in problems("deepseek_v3", shapes)


def test_names_of_transformer_engine_are_those_tensors_too() -> None:
    renamed = {
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
        "transformer_layer.": "mtp_model_layer.",
    }
    for case in ("mixtral", "deepseek_v3"):
        shapes = stored(case)
        for local, engine in renamed.items():
            shapes = {name.replace(local, engine): shape for name, shape in shapes.items()}
        assert problems(case, shapes) == ""


def test_unknown_tensors_of_a_users_module_are_no_fault() -> None:
    shapes = {**stored("gpt2"), "decoder.layers.adapter.weight": (2, 4)}
    comparison = compare_with_model(holding(shapes), shape_of("gpt2"))
    assert comparison.problems == ()
    assert "decoder.layers.adapter.weight" not in comparison.compared_names


def counted_elements(shape: ModelShape) -> int:
    """Elements of the described tensors, with the vocabulary's rows for one rank."""
    elements = sum(
        math.prod(tensor.shape) * max(1, len(tensor.layers))
        for tensor in list_model_tensors(shape)
        if not tensor.is_optional or (shape.bias and tensor.names[0].endswith("router.bias"))
    )
    tables = 1 if shape.tied_embeddings else 2
    return elements + tables * shape.padded_vocabulary() * shape.hidden


@pytest.mark.parametrize("name", model_names())
def test_described_tensors_have_as_many_elements_as_the_planner_counts(name: str) -> None:
    shape = load_model(name).shape
    if is_described(shape):
        assert counted_elements(shape) == total_parameters(shape)


@pytest.mark.parametrize("case", CASES)
def test_stored_tensors_have_as_many_elements_as_the_planner_counts(case: str) -> None:
    elements = sum(
        math.prod(shape) for name, shape in stored(case).items() if "expert_bias" not in name
    )
    assert elements == total_parameters(shape_of(case))
