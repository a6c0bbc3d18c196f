"""Closed forms of collectives compared with real runs.

`measured_calls.json` holds every counted collective of real Megatron runs at two versions: 4 layers, width 64,
sequence 64, micro batch 2, global batch 8, on CPU ranks over gloo.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.config.batch import choose_batch
from parakit.config.experts import ExpertLoad
from parakit.config.groups import Group
from parakit.config.model import ModelShape, load_model
from parakit.config.recompute import Recompute
from parakit.config.run import DeviceKind, RunSpec, TokenDispatcher, spec_from_model
from parakit.config.strategy import Batch, Parallelism, Sharding, parse_strategy
from parakit.costs.collectives.call import CollectiveCall, MegatronVersion, sum_bytes_by_group
from parakit.costs.collectives.data import bucket_elements
from parakit.costs.collectives.rank import rank_collectives
from parakit.costs.operations import Operation, wire_bytes
from parakit.costs.tensors import build_buffer, rank_parameters

GPT = ModelShape(
    layers=4,
    hidden=64,
    heads=4,
    query_groups=4,
    head_width=16,
    ffn_hidden=256,
    seq_length=64,
    positions=64,
)
MODELS = {
    "gpt": GPT,
    "rope-untied": replace(GPT, positions=0, tied_embeddings=False),
    "moe": replace(GPT, bias=False, experts=4, experts_per_token=2, expert_ffn_hidden=256),
}
MEASURED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("measured_calls.json").read_text()
)
LARGE = load_model("gpt2-large")
U = 2 * 1024 * 64 * 1280
"""Hidden states of 64 samples of gpt2-large in half precision."""


def name(case: dict[str, Any]) -> str:
    return f"{case['strategy']}-{case['model']}-stage{case['pipeline_rank']}-{case['megatron']}"


@pytest.mark.parametrize("case", MEASURED, ids=name)
def test_calls_and_bytes_equal_those_of_a_real_run(case: dict[str, Any]) -> None:
    spec = RunSpec(
        MODELS[case["model"]],
        parse_strategy(case["strategy"], case["devices"]),
        Batch(2, 8),
        dtype=case["dtype"],
        dropout=0.0,
        recompute=Recompute.parse(case["recompute"]),
        cp_comm_type="all_gather",
    )
    predicted: dict[str, list[int]] = {}
    megatron = MegatronVersion(case["megatron"])
    for item in rank_collectives(spec, case["pipeline_rank"], megatron):
        entry = predicted.setdefault(f"{item.group} {item.operation}", [0, 0])
        entry[0] += item.calls
        entry[1] += item.total_payload_bytes
    assert predicted == case["calls"]


def published(strategy: str) -> dict[Group, int]:
    parallelism = parse_strategy(strategy, 2)
    spec = spec_from_model(LARGE, parallelism, choose_batch(LARGE, parallelism, DeviceKind.GPU))
    traffic = rank_collectives(spec, 0)
    return sum_bytes_by_group(item for item in traffic if item.payload_bytes > 1_000_000)


def test_bytes_sent_by_two_gpus_follow_the_published_formulas() -> None:
    assert published("dp2") == {Group.DATA_CONTEXT: 2 * 774_090_240}
    assert published("tp2")[Group.TENSOR] == pytest.approx((36 * 4 + 2) * U, rel=0.003)
    assert published("sp2")[Group.TENSOR] == pytest.approx((36 * 5 + 3) * U, rel=0.003)
    assert published("cp2") == {Group.CONTEXT: 36 * 3 * U, Group.DATA_CONTEXT: 2 * 774_090_240}
    assert published("pp2")[Group.PIPELINE] == U


def test_all_to_all_context_parallelism_sends_two_thirds_of_the_ring() -> None:
    ring = RunSpec(LARGE.shape, Parallelism(context=2), Batch(64, 64))
    exchange = replace(ring, cp_comm_type="a2a")
    groups = [sum_bytes_by_group(rank_collectives(c))[Group.CONTEXT] for c in (ring, exchange)]
    assert groups == [36 * 3 * U, 36 * 2 * U]


@given(st.integers(2, 64), st.integers(0, 2**20))
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks: int, chunk: int) -> None:
    payload = ranks * chunk
    parts = (Operation.REDUCE_SCATTER, Operation.ALL_GATHER)
    whole = wire_bytes(Operation.ALL_REDUCE, payload, ranks)
    assert whole == sum(wire_bytes(part, payload, ranks) for part in parts)


def test_one_rank_sends_nothing() -> None:
    assert wire_bytes(Operation.ALL_REDUCE, 100, 1) == 0
    assert rank_collectives(RunSpec(GPT, Parallelism(), Batch(2, 8))) == ()


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(list(Sharding)[:2]),
)
def test_gradients_of_every_parameter_are_sent_once(
    data: int, tensor: int, pipeline: int, sharding: Sharding
) -> None:
    split = Parallelism(data=data, tensor=tensor, pipeline=pipeline, sharding=sharding)
    spec = RunSpec(GPT, split, Batch(2, 2 * data), dtype="bf16")
    for rank in range(pipeline):
        sent = sum(gradient_payloads(rank_collectives(spec, rank)))
        expected = 4 * rank_parameters(spec, rank).total if data > 1 else 0
        padding = 4 * 64 * 100 if sharding is Sharding.ZERO1 else 0
        assert expected <= sent <= expected + padding


def gradient_payloads(traffic: tuple[CollectiveCall, ...]) -> list[int]:
    return [
        item.total_payload_bytes
        for item in traffic
        if item.group is Group.DATA_CONTEXT and item.description == "gradients"
    ]


def test_buckets_align_tensors_and_divide_by_the_ranks() -> None:
    assert bucket_elements(build_buffer((1, 64, 65)), 2) == 256
    assert bucket_elements(build_buffer((1,)), 3) == 384
    assert bucket_elements(build_buffer(()), 8) == 0


def test_zero3_gathers_a_layer_twice_a_micro_batch_as_a_real_run_does() -> None:
    split = Parallelism(data=2, sharding=Sharding.ZERO3)
    traffic = rank_collectives(RunSpec(GPT, split, Batch(2, 8), dtype="fp32"))
    calls = {(i.operation, i.payload_bytes): i.calls for i in traffic if i.payload_bytes > 1000}
    # A layer's 49,984 parameters are padded to full rows of 256 on both ranks.
    layer, outside = 4 * 50_176, 12_894_720
    assert calls == {
        (Operation.ALL_GATHER, layer): 16,
        (Operation.REDUCE_SCATTER, layer): 8,
        (Operation.ALL_GATHER, outside): 1,
        (Operation.REDUCE_SCATTER, outside): 2,
    }


def test_zero2_gathers_weights_once_and_reduce_scatters_gradients_per_micro_batch() -> None:
    split = Parallelism(data=2, sharding=Sharding.ZERO2)
    traffic = rank_collectives(RunSpec(GPT, split, Batch(2, 8), dtype="fp32"))
    calls = {(i.operation, i.payload_bytes): i.calls for i in traffic if i.payload_bytes > 1000}
    # A single bucket of all 3,423,616 parameters is padded to full rows of 256 on both ranks.
    bucket = 4 * 3_423_744
    assert calls == {(Operation.ALL_GATHER, bucket): 1, (Operation.REDUCE_SCATTER, bucket): 2}


def test_torch_fsdp2_gathers_embedding_and_output_layer_in_every_pass() -> None:
    split = Parallelism(data=2, sharding=Sharding.FSDP2)
    traffic = rank_collectives(RunSpec(GPT, split, Batch(2, 8), dtype="fp32"))
    calls = {(i.operation, i.payload_bytes): i.calls for i in traffic if i.payload_bytes > 1000}
    layer, embedding, output = 4 * 49_984, 4 * (50304 + 64) * 64, 4 * (50304 + 2) * 64
    assert calls == {
        (Operation.ALL_GATHER, layer): 16,
        (Operation.REDUCE_SCATTER, layer): 8,
        (Operation.ALL_GATHER, embedding): 4,
        (Operation.REDUCE_SCATTER, embedding): 2,
        (Operation.ALL_GATHER, output): 4,
        (Operation.REDUCE_SCATTER, output): 2,
    }


def weights_and_gradients(strategy: str, ranks: int, device: DeviceKind) -> list[CollectiveCall]:
    tiny = load_model("gpt2-tiny")
    spec = replace(
        spec_from_model(tiny, parse_strategy(strategy, ranks), Batch(2, 8)),
        dtype="fp32",
        device=device,
    )
    traffic = rank_collectives(spec)
    return [item for item in traffic if item.description in ("weights", "gradients")]


def test_gloo_sends_a_reduce_scatter_twice_and_an_all_gather_once() -> None:
    gloo, ring = (weights_and_gradients("zero2", 2, device) for device in DeviceKind)
    assert [item.wire_bytes for item in ring] == [4 * 3_423_744 // 2, 4 * 3_423_744]
    assert [item.wire_bytes for item in gloo] == [4 * 3_423_744 // 2, 2 * 4 * 3_423_744]


MOE = MODELS["moe"]
EP2 = Parallelism(data=2, expert=2)


def calls_of(spec: RunSpec, group: Group) -> dict[tuple[str, int], int]:
    calls: dict[tuple[str, int], int] = {}
    for item in rank_collectives(spec):
        if item.group is group:
            key = (item.operation.value, item.payload_bytes)
            calls[key] = calls.get(key, 0) + item.calls
    return calls


def test_the_z_loss_is_logged_over_stage_pipeline_and_data_ranks() -> None:
    split = Parallelism(data=2, pipeline=2)
    plain = RunSpec(MOE, split, Batch(2, 8), dtype="fp32")
    watched = replace(plain, shape=replace(MOE, router_z_loss=True))
    more = Counter(i.group for i in rank_collectives(watched, 1))
    more -= Counter(i.group for i in rank_collectives(plain, 1))
    assert more == {Group.PIPELINE: 1, Group.DATA_CONTEXT: 1, Group.TENSOR_DATA_CONTEXT: 1}
    old = Counter(i.group for i in rank_collectives(watched, 1, MegatronVersion.F4FA7D6B))
    old -= Counter(i.group for i in rank_collectives(plain, 1, MegatronVersion.F4FA7D6B))
    assert old == {Group.PIPELINE: 1, Group.DATA_CONTEXT: 1}


def test_tokens_per_expert_are_reduced_only_for_a_load_balancing_loss() -> None:
    split = Parallelism(tensor=2, sequence_parallel=True)
    balanced = RunSpec(MOE, split, Batch(2, 8), dtype="fp32")
    free = replace(balanced, shape=replace(MOE, load_balancing=False))
    # There are four layers and four micro batches. The logging of the loss uses the same group.
    counted = calls_of(balanced, Group.TENSOR_CONTEXT)
    assert counted == {("all_reduce", 4 * 8): 16, ("all_reduce", 4 * 4): 1}
    assert calls_of(free, Group.TENSOR_CONTEXT) == {}


def test_all_gather_dispatcher_sends_every_token_to_every_expert_rank() -> None:
    gathered = replace(
        RunSpec(MOE, EP2, Batch(2, 8), dtype="fp32"),
        token_dispatcher=TokenDispatcher.ALL_GATHER,
    )
    passes = 4 * 2  # layers × micro batches
    tokens = 2 * 2 * 64  # ranks × sequences × length
    assert calls_of(gathered, Group.EXPERT) == {}
    assert calls_of(gathered, Group.TENSOR_EXPERT) == {
        ("all_gather", tokens * 4): passes,
        ("all_gather", tokens * 4 * 4): passes,
        ("all_gather", tokens * 64 * 4): 2 * passes,
        ("reduce_scatter", tokens * 64 * 4): 2 * passes,
        ("reduce_scatter", tokens * 4 * 4): passes,
    }


def test_imbalance_changes_only_the_tokens_received_by_the_busiest_rank() -> None:
    even = RunSpec(MOE, EP2, Batch(2, 8), dtype="fp32")
    busy = replace(even, expert_load=ExpertLoad(1.5))
    copies = 2 * 64 * 2  # sequences × length × experts per token
    assert set(calls_of(even, Group.EXPERT)) == {
        ("all_to_all", copies * 64 * 4),
        ("all_to_all", copies * 4),
    }
    assert set(calls_of(busy, Group.EXPERT)) == {
        ("all_to_all", 3 * copies * 64 * 2),
        ("all_to_all", 3 * copies * 2),
    }
    assert calls_of(busy, Group.TENSOR_EXPERT) == calls_of(even, Group.TENSOR_EXPERT)
    assert calls_of(busy, Group.DATA_CONTEXT) == calls_of(even, Group.DATA_CONTEXT)


def test_experts_that_are_not_split_over_tp_are_not_gathered_over_tp() -> None:
    split = Parallelism(data=2, tensor=2, expert=2, sequence_parallel=True)
    shared = RunSpec(MOE, split, Batch(2, 8), dtype="fp32")
    whole = replace(shared, parallelism=replace(split, expert_tensor=1))
    assert calls_of(shared, Group.EXPERT_TENSOR)
    assert calls_of(whole, Group.EXPERT_TENSOR) == {}
    assert calls_of(whole, Group.EXPERT) == calls_of(shared, Group.EXPERT)
