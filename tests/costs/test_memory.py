from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.config.experts import ExpertLoad
from parakit.config.flags import Flags
from parakit.config.model import LatentAttention, Model, load_model
from parakit.config.recompute import Recompute
from parakit.config.run import DeviceKind, Fp8Recipe, RunSpec, parse_state_types, spec_from_model
from parakit.config.stages import even_layout
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.costs.activations import (
    chunk_activation_bytes,
    layer_activation_bytes,
    recomputed_bytes,
)
from parakit.costs.collectives.data import gradient_collectives
from parakit.costs.constraints import find_violations
from parakit.costs.memory import (
    activation_bytes,
    estimate_rank_memory,
    find_peak_rank,
    head_backward_bytes,
    layers_in_flight,
    logits_bytes,
    placeholder_bytes,
)
from parakit.costs.operations import Operation
from parakit.costs.tensors import layer_parameters, rank_parameters, total_parameters
from parakit.formatting.units import MIB
from parakit.planner.readings.published import h200_spec
from tests.docs.residuals import PublishedResidual, memory_residuals
from tests.planner.conftest import TINY

LARGE = load_model("gpt2-large")


def tiny(parallelism: Parallelism | None = None, **changes: object) -> RunSpec:
    plain = RunSpec(TINY, parallelism or Parallelism(), Batch(2, 64))
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("residual", memory_residuals(), ids=lambda r: r.case)
def test_every_published_memory_measurement_is_predicted_within_three_percent(
    residual: PublishedResidual,
) -> None:
    assert abs(residual.error) < 0.03


def test_the_published_saving_of_sequence_parallelism_is_predicted() -> None:
    saved = (
        estimate_rank_memory(h200_spec("tp2")).total - estimate_rank_memory(h200_spec("sp2")).total
    )
    assert saved / MIB == pytest.approx(85969 - 71571, rel=0.02)


@pytest.mark.parametrize(
    ("parallelism", "fused", "coefficient"),
    [
        (Parallelism(), True, 34),
        (Parallelism(), False, 34 + 5 * 4 * 16 / 8),
        (Parallelism(tensor=2), False, 10 + 24 / 2 + 5 * 4 * 16 / (8 * 2)),
        (Parallelism(tensor=2, sequence_parallel=True), False, (34 + 5 * 4 * 16 / 8) / 2),
        (Parallelism(context=2), True, 34 / 2),
    ],
)
def test_stored_activations_of_a_layer_follow_the_paper(
    parallelism: Parallelism, fused: bool, coefficient: float
) -> None:
    spec = tiny(parallelism, fused_attention=fused)
    statistics = 4 * 4 * spec.micro_batch_tokens // parallelism.tensor if fused else 0
    assert layer_activation_bytes(spec) == coefficient * 16 * 2 * 8 + statistics


def test_all_to_all_context_parallelism_stores_attention_output_before_and_after_the_exchange() -> (
    None
):
    ring = tiny(Parallelism(context=2))
    more = layer_activation_bytes(replace(ring, cp_comm_type="a2a")) - layer_activation_bytes(ring)
    assert more == 2 * 16 * 2 * 8 // 2


def test_fp8_stores_linear_inputs_in_a_byte_and_two_copies_of_weights() -> None:
    plain, fp8 = tiny(), tiny(fp8_recipe=Fp8Recipe.TENSORWISE)
    hidden = plain.micro_batch_tokens * TINY.hidden
    # The outputs of two norms and the activated MLP become bytes; attention's output is stored a second time.
    saved = 2 * hidden + plain.micro_batch_tokens * TINY.ffn_hidden
    more = plain.micro_batch_tokens * TINY.heads * TINY.head_width
    kept = [layer_activation_bytes(spec) for spec in (plain, fp8)]
    assert kept[0] - kept[1] == saved - more
    held = rank_parameters(plain)
    bf16_memory, fp8_memory = estimate_rank_memory(plain), estimate_rank_memory(fp8)
    assert fp8_memory.weights - bf16_memory.weights == 2 * (held.attention + held.dense_mlp)
    # Gradients, fp32 weights and Adam's moments take the same bytes as with bf16.
    for name in ("gradients", "main_parameters", "optimizer_state"):
        assert getattr(fp8_memory, name) == getattr(bf16_memory, name)


def test_full_recomputation_stores_only_layer_inputs() -> None:
    assert layer_activation_bytes(tiny(recompute=Recompute.FULL)) == 2 * 16 * 2 * 8


@pytest.mark.parametrize(
    ("recompute", "inputs", "whole", "together"),
    [
        # For five layers: stored inputs, stored layers, and (layers, inputs) of the group recomputed at the peak.
        ("none", 0, 5, (0, 0)),
        ("full", 5, 0, (1, 1)),
        ("full uniform 2", 3, 0, (2, 2)),  # Only the last group has been freed, with its input.
        ("full uniform 4", 2, 0, (4, 2)),
        ("full uniform 5", 1, 0, (5, 1)),
        (
            "full block 2",
            2,
            3,
            (0, 0),
        ),  # Three stored layers are freed before a recomputed layer needs memory.
        ("full block 5", 5, 0, (1, 1)),
    ],
)
def test_stage_stores_inputs_of_recomputed_groups_and_all_of_the_other_layers(
    recompute: str, inputs: int, whole: int, together: tuple[int, int]
) -> None:
    spec = replace(tiny(), recompute=Recompute.parse(recompute))
    layer, input_ = layer_activation_bytes(tiny()), 2 * _ELEMENTS
    assert chunk_activation_bytes(spec, 5) == inputs * input_ + whole * layer
    assert recomputed_bytes(spec, 5) == together[0] * layer - together[1] * input_


def test_virtual_stages_have_separate_recomputed_groups() -> None:
    split = Parallelism(pipeline=2, virtual_stages=2)
    spec = replace(
        tiny(split), shape=replace(TINY, layers=12), recompute=Recompute.parse("full block 1")
    )
    layer = layer_activation_bytes(tiny())
    # The first rank has five virtual stages of three layers in flight, the last rank three.
    masks = 2 * _ELEMENTS  # The mask of the embedding's dropout, for two micro batches.
    assert activation_bytes(spec, 0) == 5 * (2 * _ELEMENTS + 2 * layer) + masks
    assert activation_bytes(spec, 1) == 3 * (2 * _ELEMENTS + 2 * layer) + 2 * 2 * _ELEMENTS


def test_selective_recomputation_drops_the_scores() -> None:
    spec = tiny(recompute=Recompute.SELECTIVE, fused_attention=False)
    assert layer_activation_bytes(spec) == 34 * 16 * 2 * 8


_ELEMENTS = 16 * 2 * 8
"""Elements of a hidden state: 16 positions, 2 samples, 8 columns."""
_EXPERTS = replace(
    TINY,
    bias=False,
    experts=4,
    experts_per_token=2,
    expert_ffn_hidden=4,
    shared_expert_ffn=6,
    latent=LatentAttention(3, 5, 2, 1, 2),
)


@pytest.mark.parametrize(
    ("modules", "fused_norms", "dropped"),
    [
        ("mlp", False, 2 * (4 + 4) * _ELEMENTS),
        # Transformer Engine's MLP includes its norm, whose output is recomputed too.
        ("mlp", True, 2 * (1 + 4 + 4) * _ELEMENTS),
        ("layernorm", False, 2 * 2 * _ELEMENTS),
        ("layernorm", True, 0),
        ("core_attn", True, 4 * 4 * 32),
        ("layernorm mlp", False, 2 * (2 + 4 + 4) * _ELEMENTS),
        ("moe_act", True, 0),
    ],
)
def test_dense_layer_frees_tensors_of_recomputed_modules(
    modules: str, fused_norms: bool, dropped: int
) -> None:
    spec = tiny(fused_norms=fused_norms)
    recomputing = replace(spec, recompute=Recompute.parse(modules))
    assert layer_activation_bytes(spec) - layer_activation_bytes(recomputing) == dropped


@pytest.mark.parametrize(
    ("modules", "dropped"),
    [
        ("layernorm", 2 * 2 * _ELEMENTS),
        ("shared_experts", 2 * 32 * (6 + 6)),
        ("moe_act", 2 * 2 * 2 * 32 * 4),
        # Wide tensors, every copied token, scores in fp32 and their softmax, and the shared expert.
        ("moe", 2 * 2 * 32 * (4 + 4 + 4 + 8) + 2 * 4 * 32 * 4 + 2 * 32 * (6 + 6)),
        # Queries and keys of 2 + 1 columns and values of 2 columns for 4 heads, and outputs of inner norms.
        ("mla_up_proj", 2 * 32 * 4 * (3 + 3 + 2) + 2 * 32 * (3 + 5)),
        ("mlp", 0),
    ],
)
def test_experts_and_latent_attention_free_tensors_of_recomputed_modules(
    modules: str, dropped: int
) -> None:
    spec = replace(tiny(), shape=_EXPERTS)
    recomputing = replace(spec, recompute=Recompute.parse(modules))
    assert layer_activation_bytes(spec) - layer_activation_bytes(recomputing) == dropped
    assert recomputed_bytes(recomputing) == dropped


def test_unfused_attention_stores_keys_and_values_per_head() -> None:
    shape = replace(tiny().shape, query_groups=1)
    grouped, plain = (replace(tiny(fused_attention=False), shape=s) for s in (shape, tiny().shape))
    assert layer_activation_bytes(grouped) == layer_activation_bytes(plain)
    fused = replace(grouped, fused_attention=True), replace(plain, fused_attention=True)
    assert layer_activation_bytes(fused[0]) < layer_activation_bytes(fused[1])


def test_without_dropout_no_masks_are_kept() -> None:
    with_masks, without = tiny(), tiny(dropout=0.0)
    masks = layer_activation_bytes(with_masks) - layer_activation_bytes(without)
    assert masks == 2 * 16 * 2 * 8


@pytest.mark.parametrize(
    ("dtype", "sharding", "bytes_a_parameter"),
    [
        ("fp16", Sharding.NONE, 16),
        ("bf16", Sharding.NONE, 18),
        ("fp32", Sharding.NONE, 16),
        ("fp16", Sharding.ZERO1, 4 + 12 / 4),
        ("bf16", Sharding.ZERO1, 6 + 12 / 4),
        ("fp32", Sharding.ZERO1, 8 + 8 / 4),
        ("bf16", Sharding.ZERO2, 2 + 16 / 4),
        ("fp32", Sharding.ZERO2, 4 + (4 + 4 + 8) / 4),
        ("fp32", Sharding.ZERO3, (4 + 4 + 4 + 8) / 4),
        ("bf16", Sharding.ZERO3, 18 / 4),
    ],
)
def test_state_follows_dtype_and_sharding(
    dtype: str, sharding: Sharding, bytes_a_parameter: float
) -> None:
    spec = tiny(Parallelism(data=4, sharding=sharding), dtype=dtype)
    state = estimate_rank_memory(spec).state
    assert state == bytes_a_parameter * total_parameters(TINY)


def test_memory_does_not_depend_on_the_number_of_micro_batches() -> None:
    def held(micro_batches: int) -> int:
        uneven = replace(TINY, layers=7)
        split = Parallelism(pipeline=2, virtual_stages=2)
        batch = Batch(1, micro_batches)
        return layers_in_flight(RunSpec(uneven, split, batch, stages=even_layout(7, 4)), 0)

    assert held(20) == held(10**12)


@pytest.mark.parametrize(("vocabulary", "hold"), [(64, "layers"), (64_000, "table")])
def test_zero3_holds_gathered_output_layer_and_two_full_layers_or_a_full_gradient(
    vocabulary: int, hold: str
) -> None:
    shape = replace(TINY, vocabulary=vocabulary)
    spec = replace(tiny(Parallelism(data=4, sharding=Sharding.ZERO3)), shape=shape)
    layers, table = 2 * layer_parameters(spec).total, shape.padded_vocabulary() * shape.hidden
    plain = estimate_rank_memory(replace(spec, parallelism=Parallelism(data=4))).temporaries
    parts = estimate_rank_memory(spec)
    assert parts.communication == (2 + 4) * layers
    held = {"layers": (2 + 4) * layers, "table": 4 * table}[hold]
    assert parts.communication + parts.temporaries - plain == 2 * table + held


@pytest.mark.parametrize(
    ("flags", "bytes_a_parameter"),
    [
        ("", 6 + 12 / 4),
        ("--grad-reduce-in-bf16", 4 + 12 / 4),
        ("--use-precision-aware-optimizer", 6 + (2 + 8) / 4),
        (
            "--use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16 "
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
            4 + (2 + 2 + 1) / 4,
        ),
    ],
)
def test_state_follows_the_types_of_a_precision_aware_optimizer(
    flags: str, bytes_a_parameter: float
) -> None:
    types = parse_state_types(Flags(flags.split()))
    spec = tiny(Parallelism(data=4, sharding=Sharding.ZERO1), dtype="bf16", state_types=types)
    assert estimate_rank_memory(spec).state == bytes_a_parameter * total_parameters(TINY)
    plain = tiny(Parallelism(data=4, sharding=Sharding.ZERO1), dtype="bf16")
    assert scattered(spec) == scattered(plain) // (2 if types.gradients else 1)


def test_each_instance_of_the_distributed_optimizer_shards_the_full_state() -> None:
    split = Parallelism(data=8, sharding=Sharding.ZERO1)
    spec = tiny(split, optimizer_instances=2)
    whole, inner = tiny(split), tiny(replace(split, data=4))
    assert estimate_rank_memory(spec).optimizer_state == estimate_rank_memory(inner).optimizer_state
    assert estimate_rank_memory(spec).optimizer_state > estimate_rank_memory(whole).optimizer_state
    assert "do not divide DP x CP 8" in find_violations(replace(spec, optimizer_instances=3))[0]


def scattered(spec: RunSpec) -> int:
    """Return the bytes of gradients that are being sent to other ranks."""
    calls = gradient_collectives(spec, 0)
    return sum(c.payload_bytes for c in calls if c.operation is Operation.REDUCE_SCATTER)


def test_optimizer_of_experts_is_sharded_over_expert_data_parallelism() -> None:
    moe = replace(TINY, experts=4, experts_per_token=1, expert_ffn_hidden=8, bias=False)
    split = Parallelism(data=4, expert=2, sharding=Sharding.ZERO3)
    parts = estimate_rank_memory(replace(tiny(split), shape=moe))
    experts, shared = 4 * 4 * 2 * 8 * 8, total_parameters(moe) - 4 * 4 * 2 * 8 * 8
    assert parts.weights == 2 * (shared // 4 + experts // 2 // 2)


def test_busiest_rank_stores_activations_of_more_tokens() -> None:
    moe = replace(TINY, experts=4, experts_per_token=1, expert_ffn_hidden=8, bias=False)
    even = replace(tiny(Parallelism(data=2, expert=2)), shape=moe)
    busy = replace(even, expert_load=ExpertLoad(1.5))
    # There are 16 more copies per layer: input and output of the first product, and the weighted activation.
    more = 4 * 2 * (even.micro_batch_tokens // 2) * (8 + 3 * 8)
    assert estimate_rank_memory(busy).activations - estimate_rank_memory(even).activations == more
    assert estimate_rank_memory(busy).state == estimate_rank_memory(even).state


@pytest.mark.parametrize(
    ("pipeline", "virtual", "expected"), [(1, 1, 4), (2, 1, 4), (4, 1, 4), (2, 2, 5)]
)
def test_first_stage_stores_activations_of_as_many_layers_as_the_model_has(
    pipeline: int, virtual: int, expected: int
) -> None:
    spec = tiny(Parallelism(pipeline=pipeline, virtual_stages=virtual))
    assert layers_in_flight(spec, 0) == expected


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_interleaving_holds_one_plus_p_minus_1_over_pv_models(pipeline: int, virtual: int) -> None:
    shape = replace(TINY, layers=pipeline * virtual * 2)
    parallelism = Parallelism(pipeline=pipeline, virtual_stages=virtual)
    spec = replace(tiny(parallelism), shape=shape)
    ratio = 1 + (pipeline - 1) / (pipeline * virtual) if virtual > 1 else 1
    assert layers_in_flight(spec, 0) == pytest.approx(shape.layers * ratio)


def test_few_micro_batches_store_few_activations() -> None:
    spec = replace(tiny(Parallelism(pipeline=4)), batch=Batch(2, 4))
    assert layers_in_flight(spec, 0) == 2


def test_only_the_last_stage_holds_logits() -> None:
    spec = h200_spec("pp2")
    last = estimate_rank_memory(spec, 1)
    assert last.temporaries - placeholder_bytes(spec, 1) == logits_bytes(spec)
    assert logits_bytes(spec) == 6 * 64 * 1024 * 50304
    assert estimate_rank_memory(spec, 0).temporaries < last.temporaries / 10
    assert find_peak_rank(spec)[0] == 1


def test_fused_gradient_accumulation_keeps_an_empty_gradient_per_weight_shape() -> None:
    spec = tiny(Parallelism(tensor=2))
    attention, mlp = 3 * 8 * 8 + 8 * 8, 2 * 4 * 8 * 8
    biases = 3 * 8 + 4 * 8 + 2 * 2 * 8  # Some weights are split by TP, others are not.
    table = 8 * spec.padded_vocabulary
    assert placeholder_bytes(spec, 0) == 2 * (attention + mlp + biases + table) // 2
    # All layers share these placeholders, and only the last stage has an output layer.
    assert placeholder_bytes(replace(spec, shape=replace(TINY, layers=8)), 0) == placeholder_bytes(
        spec, 0
    )
    assert placeholder_bytes(tiny(Parallelism(tensor=2, pipeline=2)), 0) == attention + mlp + biases


@pytest.mark.parametrize(
    "without",
    [{"fused_norms": False}, {"parallelism": Parallelism(data=2, sharding=Sharding.FSDP2)}],
)
def test_empty_gradients_need_transformer_engine_and_main_gradients(
    without: dict[str, object],
) -> None:
    assert placeholder_bytes(tiny(**without), 0) == 0  # type: ignore[arg-type]


def test_in_place_loss_needs_no_copy_of_logits() -> None:
    logits = 16 * 2 * 104
    plain = tiny(fused_loss=True)
    assert logits_bytes(plain) == 6 * logits
    assert logits_bytes(replace(plain, loss_impl="te")) == 2 * logits
    assert logits_bytes(tiny(loss_impl="te")) == 6 * logits
    assert logits_bytes(tiny(fused=("cross_entropy",))) == 2 * logits


def test_backward_of_the_output_layer_holds_gathered_hidden_states() -> None:
    split = Parallelism(tensor=2, sequence_parallel=True)
    spec = replace(tiny(split), fused_loss=True, loss_impl="te")
    hidden, tokens = 2 * _ELEMENTS, 16 * 2
    assert head_backward_bytes(spec) == 2 * tokens * 112 // 2 + hidden + hidden // 2
    assert head_backward_bytes(tiny()) == 2 * tokens * 104 + hidden


def test_low_precision_moments_are_updated_in_fp32_together() -> None:
    aware = ("--bf16", "--use-precision-aware-optimizer")
    half = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "fp8")
    split = Parallelism(data=2, sharding=Sharding.ZERO1)
    shape = replace(TINY, layers=64)
    specs = [
        replace(
            tiny(split, recompute=Recompute.FULL),
            shape=shape,
            state_types=parse_state_types(Flags(flags)),
        )
        for flags in (aware, (*aware, *half))
    ]
    usual, more = (estimate_rank_memory(replace(spec, dtype="bf16")) for spec in specs)
    parameters = -(-rank_parameters(specs[0]).total // 2)
    placeholders = placeholder_bytes(specs[0], 0)
    assert more.activations + more.temporaries - placeholders == 2 * 4 * parameters
    assert usual.activations + usual.temporaries - placeholders < 4 * parameters


def test_fp32_logits_are_not_copied() -> None:
    assert logits_bytes(tiny(dtype="fp32")) == 4 * 16 * 2 * 104


def test_predicted_host_memory_distinguishes_small_and_large_models() -> None:
    tiny_model = load_model("gpt2-tiny")
    assert 0.9e9 < on_cpu(tiny_model) < 2e9
    assert on_cpu(LARGE) > 100e9


def on_cpu(model: Model) -> int:
    spec = spec_from_model(model, Parallelism(), model.batch)
    spec = replace(spec, dtype="fp32", fused_attention=False, device=DeviceKind.CPU)
    return find_peak_rank(spec)[1].total
