from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.config.model import ModelShape, load_model
from parakit.config.run import RunSpec
from parakit.config.strategy import Batch, Parallelism, Sharding, parse_strategy
from parakit.costs.tensors import (
    Parameters,
    UnevenSplitError,
    active_parameters,
    distinct_weight_elements,
    explain_vocabulary_change,
    rank_parameters,
    total_parameters,
)
from tests.planner.conftest import TINY

BLUEBERRY = load_model("blueberry-79m").shape


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2-large", 774_090_240),
        ("gpt2-xl", 1_557_686_400),
        ("gpt3-345m", 64_109_568),
        ("gpt3-857m", 355_919_872),
        ("gpt3-64m", 63_847_424),
        ("llama3-8b", 8_030_261_248),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_published_models_have_the_parameters_megatron_prints(name: str, expected: int) -> None:
    assert total_parameters(load_model(name).shape) == expected


def held_by(shape: ModelShape, parallelism: Parallelism, stage: int = 0) -> Parameters:
    return rank_parameters(RunSpec(shape, parallelism, Batch(1, 1)), stage)


def count(shape: ModelShape, parallelism: Parallelism, stage: int = 0) -> int:
    return held_by(shape, parallelism, stage).total


def test_weight_shapes_are_counted_once_per_kind_of_layer() -> None:
    mixture = replace(TINY, bias=False, experts=4, experts_per_token=2, expert_ffn_hidden=4)
    attention, dense, expert = 4 * 8 * 8, 2 * 8 * 32, 2 * 8 * 4
    table = 8 * 104
    for layers in ((), (0,), (0, 1)):
        spec = RunSpec(replace(mixture, dense_layers=layers), Parallelism(), Batch(1, 1))
        assert (
            distinct_weight_elements(spec, 0)
            == attention + expert + (dense if layers else 0) + table
        )


def test_tp_2_pads_the_vocabulary_further_and_replicates_norms() -> None:
    shape = load_model("gpt2-large").shape
    assert count(shape, parse_strategy("tp2", 2)) == 387_921_920


def test_the_last_of_two_stages_holds_a_second_copy_of_the_tied_embedding() -> None:
    shape, pipeline = load_model("gpt2-large").shape, parse_strategy("pp2", 2)
    assert count(shape, pipeline, 0) == 419_893_760
    assert count(shape, pipeline, 1) == 418_585_600


def test_a_mixture_of_experts_counts_router_and_every_expert() -> None:
    assert total_parameters(BLUEBERRY) == 79_059_840
    assert active_parameters(BLUEBERRY) == 36_592_512


def test_on_gpt2_tokens_only_the_embedding_of_a_mixture_grows() -> None:
    larger = replace(BLUEBERRY, vocabulary=50257)
    assert total_parameters(larger) == 79_502_208
    assert active_parameters(larger) == 37_034_880


def test_vocabularies_that_are_padded_to_one_size_are_no_change() -> None:
    shape = load_model("gpt2-large").shape
    assert explain_vocabulary_change(shape, 50304) == ""


@pytest.mark.parametrize(
    ("mixture", "dense"), [("moe-tiny", "moe-tiny-dense"), ("blueberry-79m", "blueberry-dense")]
)
def test_a_dense_baseline_has_the_active_parameters_but_for_the_routers(
    mixture: str, dense: str
) -> None:
    shape = load_model(mixture).shape
    routers = shape.layers * shape.experts * shape.hidden
    assert active_parameters(shape) - total_parameters(load_model(dense).shape) == routers


def test_all_parameters_of_a_dense_model_are_active() -> None:
    assert active_parameters(TINY) == total_parameters(TINY)


def test_grouped_queries_narrow_only_keys_and_values() -> None:
    grouped = replace(TINY, query_groups=2)
    narrower = (
        4 * (2 * 2 * 2) * (8 + 1)
    )  # There are 2 heads of width 2 fewer, for K and V, with biases.
    assert total_parameters(TINY) - total_parameters(grouped) == narrower


def test_a_gated_mlp_has_a_first_matrix_twice_as_wide() -> None:
    extra = 4 * 32 * (8 + 1)
    gated = replace(TINY, gated=True)
    assert total_parameters(gated) - total_parameters(TINY) == extra


def test_rms_norm_has_no_bias() -> None:
    lean = replace(TINY, rms_norm=True)
    assert total_parameters(TINY) - total_parameters(lean) == (2 * 4 + 1) * 8


def test_untying_adds_one_vocabulary_matrix() -> None:
    untied = replace(TINY, tied_embeddings=False)
    assert total_parameters(untied) - total_parameters(TINY) == 104 * 8


def test_fsdp2_unties_the_output_layer() -> None:
    plain, sharded = Parallelism(data=2), Parallelism(data=2, sharding=Sharding.FSDP2)
    difference = count(TINY, sharded) - count(TINY, plain)
    assert difference == 104 * 8


def test_rotary_positions_have_no_table() -> None:
    rotary = replace(TINY, positions=0)
    assert total_parameters(TINY) - total_parameters(rotary) == 16 * 8


def test_expert_ranks_hold_their_experts_and_the_full_router() -> None:
    half = held_by(BLUEBERRY, Parallelism(data=2, expert=2))
    whole = held_by(BLUEBERRY, Parallelism(data=2))
    assert half.experts * 2 == whole.experts == 56_623_104
    assert half.shared == whole.shared


def test_experts_that_are_not_split_are_full_on_every_tensor_rank() -> None:
    split = Parallelism(data=2, tensor=2, expert=2, sequence_parallel=True)
    as_others, whole = (held_by(BLUEBERRY, replace(split, expert_tensor=ranks)) for ranks in (0, 1))
    assert whole.experts == 2 * as_others.experts == 28_311_552
    assert whole.shared == as_others.shared


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
    st.booleans(),
)
def test_the_ranks_that_hold_one_copy_of_the_experts_hold_each_expert_once(
    tensor: int, pipeline: int, expert: int, expert_tensor: int, gated: bool, grouped: bool
) -> None:
    shape = replace(BLUEBERRY, gated=gated, query_groups=4 if grouped else 8, tied_embeddings=False)
    split = Parallelism(
        data=2 * expert,
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
        sequence_parallel=tensor > 1,
    )
    stages = [held_by(shape, split, stage) for stage in range(pipeline)]
    ranks = split.effective_expert_tensor * expert
    matrices = 3 if gated else 2
    all_experts = 6 * 8 * matrices * 384 * 1536
    assert sum(stage.experts for stage in stages) * ranks == all_experts
    assert ranks * pipeline * split.expert_data == split.world_size
    assert total_parameters(shape) - active_parameters(shape) == all_experts * 6 // 8


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        (Parallelism(tensor=3), "4 attention heads .* TP 3"),
        (Parallelism(pipeline=3), "4 layers .* 3"),
        (Parallelism(pipeline=2, virtual_stages=4), "4 layers .* 8"),
    ],
)
def test_uneven_splits_are_refused(parallelism: Parallelism, message: str) -> None:
    with pytest.raises(UnevenSplitError, match=message):
        count(TINY, parallelism)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(IndexError, match="PP 2 has no rank 2"):
        held_by(TINY, Parallelism(pipeline=2), 2)


def replicated_over_tensor(shape: ModelShape, parallelism: Parallelism, stage: int) -> int:
    """Return the elements that every TP rank of a dense model holds in full: norms, row biases, positions."""
    parameters = held_by(shape, parallelism, stage)
    layers = shape.layers // parallelism.pipeline
    row_biases = 2 * shape.hidden if shape.bias else 0
    return parameters.norms + parameters.position_embedding + layers * row_biases


@given(st.sampled_from([1, 2, 4]), st.booleans(), st.booleans(), st.sampled_from([1, 2, 4]))
def test_sum_of_stages_is_the_model_plus_the_copied_embedding(
    tensor: int, tied: bool, gated: bool, pipeline: int
) -> None:
    shape = replace(TINY, tied_embeddings=tied, gated=gated)
    split = Parallelism(tensor=tensor, pipeline=pipeline)
    held = sum(
        tensor * held_by(shape, split, stage).total
        - (tensor - 1) * replicated_over_tensor(shape, split, stage)
        for stage in range(pipeline)
    )
    copy = shape.padded_vocabulary(tensor) * shape.hidden if tied and pipeline > 1 else 0
    assert held == total_parameters(shape, tensor) + copy
