"""Names and reshapings of each family: invertible bit for bit, and in Megatron's order."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parakit.artifacts.torch_dist import EMBEDDING
from parakit.config.huggingface import CONVERTIBLE_MODEL_TYPES
from parakit.config.model import ModelShape
from parakit.convert.hf.families import TensorPair, list_tensor_pairs


def shape(**other: Any) -> ModelShape:
    plain: dict[str, Any] = {
        "layers": 2,
        "hidden": 8,
        "heads": 4,
        "query_groups": 4,
        "head_width": 2,
        "ffn_hidden": 12,
        "seq_length": 16,
        "positions": 16,
        "vocabulary": 10,
    }
    return ModelShape(**{**plain, **other})


def pair(family: str, parameter: str, model: ModelShape) -> TensorPair:
    return next(
        tensor_pair
        for tensor_pair in list_tensor_pairs(family, model)
        if tensor_pair.parameter == parameter
    )


@given(
    family=st.sampled_from(CONVERTIBLE_MODEL_TYPES),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    width=st.integers(1, 3),
    hidden=st.integers(1, 9),
    ffn=st.integers(1, 7),
    tied=st.booleans(),
)
@settings(max_examples=60)
def test_split_and_join_are_inverse_bit_for_bit(
    family: str, groups: int, per_group: int, width: int, hidden: int, ffn: int, tied: bool
) -> None:
    heads = groups * per_group
    model = shape(
        layers=1,
        experts=3,
        expert_ffn_hidden=ffn,
        shared_expert_ffn=ffn + 1,
        hidden=heads * width if family == "gpt2" else hidden,
        heads=heads,
        query_groups=heads if family == "gpt2" else groups,
        head_width=width,
        ffn_hidden=ffn,
        tied_embeddings=tied,
    )
    for tensor_pair in list_tensor_pairs(family, model):
        whole = torch.randn(tensor_pair.shape)
        parts = tensor_pair.form.split(whole)
        assert tuple(tuple(part.shape) for part in parts) == tensor_pair.shapes
        assert torch.equal(tensor_pair.form.join(parts), whole)
        again = tensor_pair.form.split(tensor_pair.form.join(parts))
        assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_rows_of_llama_lie_by_group_its_queries_then_its_key_then_its_value() -> None:
    model = shape(hidden=1, heads=4, query_groups=2, head_width=1)
    qkv = pair("llama", "decoder.layers.0.self_attention.linear_qkv.weight", model)
    queries, keys, values = torch.tensor([[1.0], [2], [3], [4]]), [[5.0], [6]], [[7.0], [8]]
    joined = qkv.form.join((queries, torch.tensor(keys), torch.tensor(values)))
    assert joined.flatten().tolist() == [1, 2, 5, 7, 3, 4, 6, 8]


def test_rows_of_gpt2_lie_by_head_and_its_matrices_are_transposed() -> None:
    model = shape(hidden=2, heads=2, query_groups=2, head_width=1)
    weight = pair("gpt2", "decoder.layers.0.self_attention.linear_qkv.weight", model)
    stored = torch.tensor([[1.0, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]])
    joined = weight.form.join((stored,))
    assert joined.tolist() == [[1, 11], [3, 13], [5, 15], [2, 12], [4, 14], [6, 16]]
    bias = pair("gpt2", "decoder.layers.0.self_attention.linear_qkv.bias", model)
    assert bias.form.join((torch.arange(6.0),)).tolist() == [0, 2, 4, 1, 3, 5]


def test_gate_comes_before_value() -> None:
    model = shape(hidden=1, ffn_hidden=2)
    fc1 = pair("llama", "decoder.layers.1.mlp.linear_fc1.weight", model)
    assert fc1.names == ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight")
    joined = fc1.form.join((torch.tensor([[1.0], [2]]), torch.tensor([[3.0], [4]])))
    assert joined.flatten().tolist() == [1, 2, 3, 4]


def test_norm_has_transformer_engines_key_and_the_name_of_its_module() -> None:
    norm = next(
        tensor_pair
        for tensor_pair in list_tensor_pairs("llama", shape())
        if "input_layernorm" in tensor_pair.names[0]
    )
    assert norm.key == "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert norm.parameter == "decoder.layers.0.input_layernorm.weight"


def test_experts_are_stacked_with_gate_before_value() -> None:
    model = shape(hidden=1, experts=2, expert_ffn_hidden=1)
    fc1 = pair("mixtral", "decoder.layers.1.mlp.experts.experts.linear_fc1.weight", model)
    prefix = "model.layers.1.block_sparse_moe.experts"
    assert fc1.names == tuple(f"{prefix}.{e}.{w}.weight" for e in (0, 1) for w in ("w1", "w3"))
    joined = fc1.form.join([torch.tensor([[value]]) for value in (1.0, 2.0, 3.0, 4.0)])
    assert joined.tolist() == [[[1], [2]], [[3], [4]]]
    assert fc1.loaded_names == ("model.layers.1.mlp.experts.gate_up_proj",)


def test_norm_before_experts_has_the_keys_of_both_kinds_of_layers() -> None:
    model = shape(experts=2, expert_ffn_hidden=2)
    norm = pair("qwen3_moe", "decoder.layers.0.pre_mlp_layernorm.weight", model)
    assert norm.keys == (
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.pre_mlp_layernorm.weight",
    )


@pytest.mark.parametrize(("tied", "count"), [(True, 2 + 12 * 2 + 2), (False, 2 + 12 * 2 + 3)])
def test_an_untied_model_has_an_output_layer_last(tied: bool, count: int) -> None:
    pairs = list_tensor_pairs("gpt2", shape(tied_embeddings=tied))
    assert len(pairs) == count
    assert pairs[0].key == EMBEDDING
    assert (pairs[-1].names == ("lm_head.weight",)) is not tied
