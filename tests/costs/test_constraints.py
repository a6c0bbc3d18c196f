from dataclasses import replace
from typing import Any

import pytest

from parakit.config.batch import choose_batch
from parakit.config.model import ModelShape, load_model
from parakit.config.recompute import Recompute
from parakit.config.run import Backend, DeviceKind, RunSpec, spec_from_model
from parakit.config.stages import StageSplit
from parakit.config.strategy import (
    PUBLISHED_STRATEGIES,
    Batch,
    Parallelism,
    PipelineSchedule,
    Sharding,
    parse_strategy,
)
from parakit.costs.constraints import find_violations

LARGE = load_model("gpt2-large")
XL = load_model("gpt2-xl")
MOE = replace(
    LARGE.shape, experts=8, experts_per_token=2, expert_ffn_hidden=5120, bias=False, layers=6
)


def refusals(
    shape: ModelShape,
    parallelism: Parallelism,
    batch: Batch,
    release: tuple[int, int] | None = None,
    **choices: Any,
) -> tuple[str, ...]:
    return find_violations(RunSpec(shape, parallelism, batch, **choices), release)


@pytest.mark.parametrize("name", PUBLISHED_STRATEGIES)
def test_the_six_published_runs_are_legal(name: str) -> None:
    parallelism = parse_strategy(name, 1 if name == "baseline" else 2)
    batch = choose_batch(LARGE, parallelism, DeviceKind.GPU)
    assert refusals(LARGE.shape, parallelism, batch, dtype="fp16") == ()


def test_refusal_of_indivisible_heads_names_the_dividing_degrees() -> None:
    violations = refusals(XL.shape, Parallelism(tensor=2), Batch(16, 16), model="gpt2-xl")
    assert violations == (
        "gpt2-xl has 25 attention heads, which TP 2 does not divide; use a TP of 1, 5 or 25.",
    )


@pytest.mark.parametrize(
    ("parallelism", "batch", "sentence"),
    [
        (Parallelism(pipeline=5), Batch(1, 1), "36 layers, which PP 5"),
        (Parallelism(pipeline=4, virtual_stages=2), Batch(1, 4), "PP 4 x 2 virtual stages"),
        (Parallelism(virtual_stages=2), Batch(1, 1), "use PP 2 or more"),
        (Parallelism(pipeline=2, virtual_stages=2), Batch(1, 3), "use a global batch of 4"),
        (Parallelism(data=2), Batch(2, 6), "no multiple of 4"),
        (Parallelism(context=3), Batch(1, 1), "no multiple of 6"),
        (Parallelism(data=2, expert=2), Batch(1, 2), "needs experts"),
        (Parallelism(data=0), Batch(1, 1), "DP is 0; use 1 or more"),
        (Parallelism(), Batch(1, 0), "global batch is 0"),
        (Parallelism(pipeline=2, sharding=Sharding.ZERO3), Batch(1, 1), "so PP 2 breaks it"),
        (Parallelism(pipeline=2, sharding=Sharding.FSDP2), Batch(1, 1), "FSDP2 refuses PP 2"),
        (
            Parallelism(pipeline=2, schedule=PipelineSchedule.GPIPE),
            Batch(1, 1),
            "gpipe2 is trained by plain PyTorch",
        ),
    ],
)
def test_each_refusal_names_the_problem_and_an_alternative(
    parallelism: Parallelism, batch: Batch, sentence: str
) -> None:
    (violation,) = refusals(LARGE.shape, parallelism, batch)
    assert sentence in violation
    assert violation.endswith(".")
    assert ";" in violation


def test_pipedream_needs_a_micro_batch_per_update_and_2bw_a_micro_batch_per_stage() -> None:
    spec = replace(spec_from_model(LARGE, Parallelism(), Batch(1, 4)), backend=Backend.NATIVE)
    whole = Parallelism(pipeline=4, schedule=PipelineSchedule.PIPEDREAM)
    buffered = Parallelism(pipeline=4, schedule=PipelineSchedule.PIPEDREAM_2BW)
    assert find_violations(replace(spec, parallelism=buffered)) == ()
    (violation,) = find_violations(replace(spec, parallelism=whole))
    assert "use a micro batch of 4, or pipedream4bw" in violation
    (violation,) = find_violations(replace(spec, parallelism=buffered, batch=Batch(2, 4)))
    assert "use a global batch of 8" in violation


def test_refusal_of_a_native_pipeline_names_no_megatron_flags() -> None:
    split = Parallelism(pipeline=5, schedule=PipelineSchedule.GPIPE)
    spec = spec_from_model(LARGE, split, Batch(1, 5))
    (violation,) = find_violations(replace(spec, backend=Backend.NATIVE))
    assert "36 layers, which PP 5 does not divide; use a PP of 1, 2, 3" in violation
    assert "--" not in violation


def test_all_to_all_context_parallelism_needs_enough_heads() -> None:
    split, batch = Parallelism(context=32), Batch(1, 1)
    assert refusals(LARGE.shape, split, batch) == ()
    (violation,) = refusals(LARGE.shape, split, batch, cp_comm_type="a2a")
    assert "16 key/value heads per TP rank, which all-to-all CP 32 does not divide" in violation


def test_refusal_of_indivisible_layers_names_the_flags_that_place_them() -> None:
    shape = replace(LARGE.shape, layers=126)
    split, batch = Parallelism(pipeline=8, virtual_stages=8), Batch(1, 8)
    (violation,) = refusals(shape, split, batch)
    assert "126 layers, which PP 8 x 8 virtual stages does not divide" in violation
    assert violation.endswith(
        ", or --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split."
    )
    stages = StageSplit(embedding=True, loss=True)
    assert refusals(shape, split, batch, stages=stages) == ()
    (violation,) = refusals(shape, split, batch, stages=StageSplit(first=3))
    assert "the other 123 layers do not divide over 7 other stages; use a PP of" in violation


def test_an_unknown_context_communication_is_refused() -> None:
    (violation,) = refusals(LARGE.shape, Parallelism(context=2), Batch(1, 1), cp_comm_type="ring")
    assert "use p2p, all_gather or a2a" in violation


def test_query_groups_are_split_like_heads() -> None:
    grouped = replace(LARGE.shape, query_groups=2)
    (violation,) = refusals(grouped, Parallelism(tensor=4), Batch(1, 1))
    assert "2 query groups, which TP 4 does not divide; use a TP of 1 or 2" in violation


def test_from_0_16_on_ranks_share_a_query_group() -> None:
    shape = replace(LARGE.shape, query_groups=1)
    spec = RunSpec(shape, Parallelism(tensor=2), Batch(1, 1))
    assert find_violations(spec, (0, 16)) == ()
    (violation,) = find_violations(spec, (0, 15))
    assert "1 query groups, which TP 2 does not divide" in violation
    three = replace(
        spec, shape=replace(LARGE.shape, query_groups=2), parallelism=Parallelism(tensor=5)
    )
    assert any("2 query groups" in sentence for sentence in find_violations(three, (0, 19)))


def test_a_sequence_longer_than_the_position_table_is_refused() -> None:
    (violation,) = refusals(replace(LARGE.shape, seq_length=2048), Parallelism(), Batch(1, 1))
    assert "exceeds the model's 1024 learned positions" in violation


def test_experts_need_sequence_parallelism_under_tp_and_divide_by_ep() -> None:
    (violation,) = refusals(MOE, Parallelism(tensor=2), Batch(1, 1))
    assert "need --sequence-parallel" in violation
    (violation,) = refusals(MOE, Parallelism(data=3, expert=3), Batch(1, 3))
    assert "8 experts, which EP 3 does not divide; use an EP of 1, 2, 4 or 8" in violation
    (violation,) = refusals(MOE, Parallelism(data=2, expert=4), Batch(1, 2))
    assert "use an EP of 1 or 2" in violation


def test_experts_with_biases_are_refused() -> None:
    (violation,) = refusals(replace(MOE, bias=True), Parallelism(), Batch(1, 1))
    assert "--disable-bias-linear" in violation


@pytest.mark.parametrize(
    ("recompute", "refused"), [("full", False), ("full uniform 2", True), ("full block 1", True)]
)
def test_hybrid_blocks_are_recomputed_singly_or_not_at_all(recompute: str, refused: bool) -> None:
    shape = replace(LARGE.shape, layers=1, blocks="*-*-")
    violations = refusals(shape, Parallelism(), Batch(1, 1), recompute=Recompute.parse(recompute))
    assert [("uniform --recompute-num-layers 1" in sentence) for sentence in violations] == [
        True
    ] * refused


@pytest.mark.parametrize(
    ("modules", "bias", "fits"),
    [
        ("mlp", True, False),
        ("layernorm mlp", True, False),
        ("mlp", False, True),
        ("layernorm", True, True),
        ("full", True, True),
    ],
)
def test_recomputing_only_an_mlp_with_biases_is_refused(
    modules: str, bias: bool, fits: bool
) -> None:
    shape = replace(LARGE.shape, bias=bias)
    violations = refusals(shape, Parallelism(), Batch(1, 1), recompute=Recompute.parse(modules))
    assert [("--disable-bias-linear" in reason) for reason in violations] == (
        [] if fits else [True]
    )


def test_fp16_is_refused_in_the_same_cases_as_in_megatron() -> None:
    (violation,) = refusals(MOE, Parallelism(data=2, expert=2), Batch(1, 2), dtype="fp16")
    assert "EP refuses fp16" in violation
    fsdp2 = Parallelism(data=2, sharding=Sharding.FSDP2)
    (violation,) = refusals(LARGE.shape, fsdp2, Batch(1, 2), dtype="fp16")
    assert "FSDP2 refuses fp16; use --bf16" in violation


def test_experts_in_fp16_are_refused_up_to_015() -> None:
    moe, split, batch = MOE, Parallelism(data=2, expert=2), Batch(1, 2)
    for release in (None, (0, 15)):
        (violation,) = refusals(moe, split, batch, dtype="fp16", release=release)
        assert (
            violation
            == "EP refuses fp16 (up to 0.15, f4fa7d6b included); use --bf16, or Megatron 0.16."
        )
    assert refusals(moe, split, batch, dtype="fp16", release=(0, 16)) == ()
    assert refusals(moe, Parallelism(data=2), batch, dtype="fp16", release=(0, 15)) == ()


@pytest.mark.parametrize("chosen", [0, 9])
def test_experts_per_token_are_at_least_one_and_at_most_all(chosen: int) -> None:
    (violation,) = refusals(replace(MOE, experts_per_token=chosen), Parallelism(), Batch(1, 1))
    assert f"to {chosen} of 8 experts; use a --moe-router-topk of 1 to 8." in violation


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        # TP 2 × DP 2 gives four ranks for experts that are not split.
        (Parallelism(data=2, tensor=2, expert=4, expert_tensor=1, sequence_parallel=True), ""),
        (Parallelism(data=2, tensor=2, expert=2, expert_tensor=1, sequence_parallel=True), ""),
        (Parallelism(data=2, tensor=2, expert=2, expert_tensor=4, sequence_parallel=True), "= 1"),
        (Parallelism(data=2, tensor=2, expert=4, sequence_parallel=True), "DP x CP = 2"),
        (Parallelism(data=3, expert_tensor=3), "which ETP 3 does not divide"),
        (Parallelism(data=2, expert_tensor=4), "DP x CP x TP = 2 and does not divide it"),
    ],
)
def test_expert_tensor_parallelism_may_differ_from_tp(split: Parallelism, sentence: str) -> None:
    violations = refusals(MOE, split, Batch(1, split.data))
    assert (sentence in violations[0]) if sentence else not violations
