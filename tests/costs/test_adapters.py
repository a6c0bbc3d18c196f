"""Adapters of LoRA: their parameters, what a rank stores, and what ranks send."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parakit.config.groups import Group
from parakit.config.model import LatentAttention, ModelShape
from parakit.config.peft import LORA_TARGETS, FrozenWeights, Lora
from parakit.config.run import Fp8Recipe, RunSpec
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.costs import (
    adapter_parameters,
    adapter_rules,
    estimate_rank_memory,
    find_violations,
    gradient_collectives,
    iteration_flops,
    layer_activation_bytes,
    layer_collectives,
    list_adapted_linears,
    partial_gradient_collectives,
    pipeline_collectives,
    rank_parameters,
    token_flops,
    total_parameters,
    trained_parameters,
)
from parakit.costs.operations import Operation, Phase

LLAMA3_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    query_groups=8,
    head_width=128,
    ffn_hidden=14336,
    seq_length=4096,
    positions=0,
    vocabulary=128256,
    vocabulary_multiple=1,
    gated=True,
    rms_norm=True,
    bias=False,
    tied_embeddings=False,
)
QKV = Lora(rank=16, targets=("linear_qkv",))
ALL_LINEARS = Lora(rank=16)


def llama(lora: Lora | None, split: Parallelism | None = None, **changes: object) -> RunSpec:
    """Return a run of Llama 3 8B, whose global batch is two micro batches of one sample per replica."""
    split = split or Parallelism()
    spec = RunSpec(LLAMA3_8B, split, Batch(1, 2 * split.data), dropout=0.0, lora=lora)
    return replace(spec, **changes)  # type: ignore[arg-type]


def test_the_parameters_of_an_adapter_are_rank_times_inputs_and_outputs() -> None:
    assert total_parameters(LLAMA3_8B) == 8_030_261_248
    # Hugging Face's peft has r * (in_features + out_features) per adapted Linear. Megatron's qkv and fc1 are one
    # layer each, with 4096 + 2 * 1024 and 2 * 14336 outputs.
    assert adapter_parameters(LLAMA3_8B, QKV) == 32 * 16 * (4096 + 6144)
    linears = (4096 + 6144) + (4096 + 4096) + (4096 + 28672) + (14336 + 4096)
    assert adapter_parameters(LLAMA3_8B, ALL_LINEARS) == 32 * 16 * linears == 35_651_584


def test_tensor_and_pipeline_parallelism_split_the_adapters_of_a_dense_model() -> None:
    split = Parallelism(data=2, tensor=2, pipeline=4)
    trained = [trained_parameters(llama(ALL_LINEARS, split), rank).total for rank in range(4)]
    assert trained == [35_651_584 // 8] * 4


def test_a_run_without_lora_trains_all_parameters() -> None:
    spec = llama(None, Parallelism(tensor=2, pipeline=2))
    assert trained_parameters(spec, 1) == rank_parameters(spec, 1)


def test_experts_of_a_layer_share_one_adapter_and_the_router_has_none() -> None:
    mixture = replace(LLAMA3_8B, experts=8, experts_per_token=2, expert_ffn_hidden=1024, layers=1)
    of_experts = 16 * ((4096 + 2048) + (1024 + 4096))
    of_attention = 16 * ((4096 + 6144) + (4096 + 4096))
    assert adapter_parameters(mixture, ALL_LINEARS) == of_attention + of_experts
    spec = RunSpec(mixture, Parallelism(data=8, expert=8), Batch(1, 8), lora=ALL_LINEARS)
    assert trained_parameters(spec).experts == of_experts
    assert trained_parameters(spec).router == 0


def test_latent_attention_has_adapters_by_its_own_names() -> None:
    latent = LatentAttention(
        query_rank=1536, key_value_rank=512, head_width=128, rotary_width=64, value_width=128
    )
    shape = replace(LLAMA3_8B, latent=latent, layers=1)
    names = [linear.name for linear in list_adapted_linears(shape, Lora(targets=LORA_TARGETS))]
    assert names == [
        *("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
        *("linear_proj", "linear_fc1", "linear_fc2"),
    ]
    down = Lora(rank=4, targets=("linear_kv_down_proj",))
    spec = RunSpec(shape, Parallelism(tensor=4), Batch(1, 1), lora=down)
    # TP does not split a down-projection, so each rank has the full adapter.
    assert trained_parameters(spec).total == adapter_parameters(shape, down) == 4 * (4096 + 576)


def test_only_adapters_have_gradients_main_weights_and_moments() -> None:
    trained = adapter_parameters(LLAMA3_8B, ALL_LINEARS)
    memory = estimate_rank_memory(llama(ALL_LINEARS))
    assert memory.weights == 2 * (total_parameters(LLAMA3_8B) + trained)
    assert memory.gradients == 4 * trained
    assert memory.main_parameters == 4 * trained
    assert memory.optimizer_state == 8 * trained


def test_zero1_shards_the_optimizer_states_of_adapters() -> None:
    trained = adapter_parameters(LLAMA3_8B, ALL_LINEARS)
    memory = estimate_rank_memory(llama(ALL_LINEARS, Parallelism(data=8, sharding=Sharding.ZERO1)))
    assert memory.optimizer_state == 8 * trained // 8
    assert memory.gradients == 4 * trained


def test_linear_weights_in_nf4_take_four_bits_and_their_scales() -> None:
    lora = replace(ALL_LINEARS, weights=FrozenWeights.NF4)
    full, quantised = (estimate_rank_memory(llama(item)).weights for item in (ALL_LINEARS, lora))
    linear = 32 * (4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096)
    # 4 + 8/64 + 32/(64 * 256) bits per weight; embedding, norms and output layer keep two bytes.
    assert full - quantised == 2 * linear - (4 * linear + linear // 8 + linear // 512) // 8


def test_a_weight_in_nf4_is_converted_one_layer_at_a_time() -> None:
    lora = replace(ALL_LINEARS, weights=FrozenWeights.NF4)
    split = Parallelism(data=2, pipeline=2)
    full, quantised = (
        estimate_rank_memory(llama(item, split)).temporaries for item in (ALL_LINEARS, lora)
    )
    assert quantised - full == 2 * 4096 * 28672


def test_a_frozen_layer_stores_its_input_only_for_its_adapter() -> None:
    hidden, rank = 2 * 4096 * 4096, 2 * 4096 * 16
    none, qkv, everything = (
        layer_activation_bytes(llama(lora)) for lora in (None, QKV, ALL_LINEARS)
    )
    # The outputs of both norms and of the activation are inputs of linear layers. The output of attention is stored
    # for attention itself. Each adapter stores the output of its first matrix.
    assert everything == none + 4 * rank
    assert qkv == none - hidden - 2 * 4096 * 14336 + rank


def test_adapters_store_half_precision_also_if_frozen_layers_compute_in_fp8() -> None:
    plain, fp8 = (
        layer_activation_bytes(llama(ALL_LINEARS, fp8_recipe=recipe))
        for recipe in (Fp8Recipe.NONE, Fp8Recipe.TENSORWISE)
    )
    assert plain == fp8


def test_under_sequence_parallelism_adapters_store_gathered_inputs() -> None:
    split = Parallelism(tensor=4, sequence_parallel=True)
    without, with_qkv = (
        layer_activation_bytes(llama(Lora(4, targets), split))
        for targets in (("linear_proj",), ("linear_qkv", "linear_proj"))
    )
    assert with_qkv - without == 2 * 4096 * (4096 + 4)


def test_data_parallel_ranks_reduce_the_gradients_of_adapters_alone() -> None:
    calls = list(gradient_collectives(llama(ALL_LINEARS, Parallelism(data=8)), 0))
    reduced = [call for call in calls if call.payload_bytes]
    assert [call.payload_bytes for call in reduced] == [4 * 35_651_584]


def test_zero3_gathers_frozen_weights_and_reduces_adapters_alone() -> None:
    split = Parallelism(data=8, sharding=Sharding.ZERO3)
    calls = list(gradient_collectives(llama(ALL_LINEARS, split), 0))
    gathered = sum(c.payload_bytes for c in calls if c.operation is Operation.ALL_GATHER)
    reduced = [c for c in calls if c.operation is Operation.REDUCE_SCATTER and c.payload_bytes]
    assert gathered > 4096 * 28672
    assert [(c.payload_bytes, c.calls) for c in reduced] == [(4 * 35_651_584, 2)]


def test_frozen_norms_and_embeddings_have_no_gradients_to_sum() -> None:
    split = Parallelism(tensor=2, pipeline=2, sequence_parallel=True)
    spec = llama(ALL_LINEARS, split, shape=replace(LLAMA3_8B, tied_embeddings=True))
    assert list(partial_gradient_collectives(spec, 0)) == []
    trained = replace(spec, lora=None)
    groups = [{call.group for call in pipeline_collectives(run, 0)} for run in (spec, trained)]
    assert [Group.EMBEDDING in group for group in groups] == [False, True]


def test_only_adapters_of_row_parallel_layers_gather_full_hidden_states() -> None:
    split = Parallelism(tensor=2, sequence_parallel=True)
    hidden = 2 * 4096 * 4096

    def count_hidden_gathers(lora: Lora) -> int:
        """Return the gathers of hidden states that are not those of the frozen layers themselves."""
        return sum(
            call.calls
            for call in layer_collectives(llama(lora, split))
            if "adapter" in call.description and call.payload_bytes == hidden
        )

    # Two micro batches of 32 layers, forward and backward.
    assert count_hidden_gathers(QKV) == 0
    assert count_hidden_gathers(Lora(16, ("linear_proj",))) == 2 * 2 * 32


def test_a_frozen_layer_does_not_gather_its_input_a_second_time() -> None:
    split = Parallelism(tensor=2, sequence_parallel=True)
    backward_gathers = [
        sum(
            call.calls
            for call in layer_collectives(llama(lora, split))
            if call.operation is Operation.ALL_GATHER and call.phase is Phase.BACKWARD
        )
        for lora in (None, QKV)
    ]
    assert backward_gathers == [2 * 2 * 2 * 32, 2 * 2 * 32]


def test_frozen_matrices_cost_two_thirds_of_trained_ones() -> None:
    flops, tokens = token_flops(LLAMA3_8B), 2 * 4096
    trained, frozen = (iteration_flops(llama(lora)) for lora in (None, QKV))
    assert trained == 3 * tokens * flops.total
    assert trained - frozen == tokens * (flops.total - flops.attention_scores)


def test_a_rank_that_tensor_parallelism_does_not_divide_is_refused() -> None:
    spec = llama(Lora(rank=4), Parallelism(tensor=8))
    assert find_violations(spec) == (
        "TP 8 does not divide LoRA's rank 4; use a rank that is a multiple of 8.",
    )
    assert find_violations(replace(spec, lora=Lora(rank=8))) == ()
    assert tuple(adapter_rules(Lora(rank=2), Parallelism(expert=2, expert_tensor=4))) == (
        "ETP 4 does not divide LoRA's rank 2; use a rank that is a multiple of 4.",
    )


@pytest.mark.parametrize(
    "split",
    [
        Parallelism(tensor=2),
        Parallelism(data=2, pipeline=2),
        Parallelism(data=2, sharding=Sharding.ZERO3),
    ],
)
def test_weights_in_nf4_are_replicated(split: Parallelism) -> None:
    lora = Lora(weights=FrozenWeights.NF4)
    (sentence,) = find_violations(llama(lora, split))
    assert sentence.startswith("Weights in NF4 are planned with data parallelism alone")
    assert find_violations(llama(lora, Parallelism(data=8, sharding=Sharding.ZERO1))) == ()


@settings(max_examples=40)
@given(
    rank=st.integers(1, 32).map(lambda factor: 4 * factor),
    targets=st.sets(st.sampled_from(Lora().targets), min_size=1),
    tensor=st.sampled_from((1, 2, 4)),
    pipeline=st.sampled_from((1, 2)),
    sharding=st.sampled_from((Sharding.NONE, Sharding.ZERO1)),
)
def test_a_larger_rank_needs_more_memory_and_never_more_than_full_training(
    rank: int, targets: set[str], tensor: int, pipeline: int, sharding: Sharding
) -> None:
    split = Parallelism(data=2, tensor=tensor, pipeline=pipeline, sharding=sharding)
    ordered = tuple(name for name in LORA_TARGETS if name in targets)
    smaller, larger = (
        estimate_rank_memory(llama(Lora(size, ordered), split)) for size in (rank, 2 * rank)
    )
    assert smaller.total < larger.total
    assert larger.state < estimate_rank_memory(llama(None, split)).state
