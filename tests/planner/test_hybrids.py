"""Layers of several kinds: Mamba-2 mixers, attention, MLPs and experts by a pattern."""

from dataclasses import replace
from pathlib import Path

import pytest

from parakit.config.groups import Group
from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import Mamba, ModelShape
from parakit.config.run import Fp8Recipe, RunSpec
from parakit.config.strategy import Batch, Parallelism
from parakit.costs.collectives.call import sum_bytes_by_group
from parakit.costs.collectives.rank import rank_collectives
from parakit.costs.collectives.tensor import layer_collectives
from parakit.costs.constraints import find_violations
from parakit.costs.flops import token_flops
from parakit.costs.memory import estimate_rank_memory
from parakit.costs.tensors import (
    active_parameters,
    rank_parameters,
    rank_tensors,
    total_parameters,
)
from parakit.planner.readings.reading_to_spec import convert_measurement
from parakit.planner.readings.table import read_measurements
from parakit.planner.request import build_request
from parakit.planner.search import Request, search_configurations
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.execution import Execution
from parakit.planner.time.iteration import iteration_seconds
from tests.given import asked_of_plan

DENSE = ModelShape(
    layers=6,
    hidden=512,
    heads=8,
    query_groups=4,
    head_width=64,
    ffn_hidden=2048,
    seq_length=1024,
    positions=0,
    bias=False,
    rms_norm=True,
)
MIXER = Mamba(heads=16, head_width=64, groups=8, state=128)


def on_gpus(shape: ModelShape, tensor: int = 1) -> RunSpec:
    split = Parallelism(tensor=tensor, sequence_parallel=tensor > 1)
    return RunSpec(shape, split, Batch(2, 4), dropout=0.0)


def gpus(spec: RunSpec, graphs: bool = True) -> Cluster:
    device = device_by_key("b200")
    link = link_by_key(device.link)
    execution = Execution(graphs=graphs)
    return Cluster(device, spec.parallelism.world_size, 8, link, link, execution=execution)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("experts", [False, True])
def test_attention_block_followed_by_mlp_or_experts_costs_a_transformer_layer(
    tensor: int, experts: bool
) -> None:
    whole = DENSE
    if experts:
        whole = replace(DENSE, experts=8, experts_per_token=2, expert_ffn_hidden=256)
    plain = on_gpus(whole, tensor)
    for layers, blocks in ((6, "*E" if experts else "*-"), (1, 6 * ("*E" if experts else "*-"))):
        hybrid = on_gpus(replace(whole, layers=layers, blocks=blocks), tensor)
        assert total_parameters(hybrid.shape) == total_parameters(plain.shape)
        assert active_parameters(hybrid.shape) == active_parameters(plain.shape)
        assert rank_parameters(hybrid) == rank_parameters(plain)
        assert sorted(rank_tensors(hybrid)) == sorted(rank_tensors(plain))
        assert sum(rank_tensors(plain)) == rank_parameters(plain).total
        assert token_flops(hybrid.shape) == token_flops(plain.shape)
        assert estimate_rank_memory(hybrid) == estimate_rank_memory(plain)
        sent, wanted_sent = (sum_bytes_by_group(rank_collectives(run)) for run in (hybrid, plain))
        logged = Group.TENSOR_CONTEXT  # The router's losses: a number a block, not a layer.
        assert {**sent, logged: 0} == {**wanted_sent, logged: 0}
        times, expected = (iteration_seconds(run, gpus(run)) for run in (hybrid, plain))
        for part in ("matmul", "attention", "memory_bound", "expert_parallel", "optimizer"):
            assert getattr(times, part) == pytest.approx(getattr(expected, part), rel=1e-6)
        # A call is hidden behind its own block's weight gradients, not behind the whole layer's.
        assert times.tensor_parallel >= (1 - 1e-6) * expected.tensor_parallel


@pytest.mark.parametrize("experts", [False, True])
def test_blocks_quantise_the_operands_of_a_transformer_layer_in_fp8(experts: bool) -> None:
    shape = DENSE
    if experts:
        shape = replace(DENSE, experts=8, experts_per_token=2, expert_ffn_hidden=256)
    hybrid = on_gpus(replace(shape, blocks="*E" if experts else "*-"))
    times, expected = (
        iteration_seconds(fp8_run, gpus(fp8_run))
        for fp8_run in (
            replace(run, fp8_recipe=Fp8Recipe.MXFP8) for run in (hybrid, on_gpus(shape))
        )
    )
    assert times.memory_bound == pytest.approx(expected.memory_bound, rel=1e-6)


def test_mixer_parameters_match_megatron() -> None:
    # MambaMixer of megatron-core 0.19.0, built on a CPU: conv1d (3072, 1, 4) and (3072), dt_bias, A_log
    # and D (16), in_proj (4112, 512), norm (1024), out_proj (512, 1024); beside it the block's own norm.
    shape = replace(DENSE, blocks="M", layers=1, mamba=MIXER)
    without = replace(shape, layers=0)
    assert total_parameters(shape) - total_parameters(without) == 2_646_064 + 512


def test_tensor_parallel_mixer_is_split_by_heads_with_a_collective_per_direction() -> None:
    shape = replace(DENSE, blocks="M" * 6, layers=1, mamba=MIXER)
    mixer = rank_parameters(on_gpus(shape)).attention
    assert rank_parameters(on_gpus(shape, 2)).attention == mixer / 2
    mixers, layers = (
        sum(call.total_payload_bytes for call in layer_collectives(on_gpus(model_shape, 2)))
        for model_shape in (shape, DENSE)
    )
    assert mixers == layers / 2


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        # Published: 31.6 and 3.6 billion; 120.6 and 12.7 without the two MTP layers; 400 and 17.
        ("nemotron-3-nano", 31_577_937_344, 3_580_073_408),
        ("nemotron-3-super", 120_668_687_360, 12_770_216_960),
        ("llama4-maverick-400b", 400_712_504_320, 17_185_346_560),
    ],
)
def test_published_hybrids_have_their_parameters(model: str, total: int, active: int) -> None:
    measurement = next(r for r in read_measurements()[0] if r.model == model)
    shape = convert_measurement(measurement).spec.shape
    main = replace(shape, blocks=shape.blocks.partition("/")[0])
    assert (total_parameters(main), active_parameters(main)) == (total, active)


def test_mtp_depth_costs_its_blocks_a_projection_and_another_output_layer() -> None:
    single = replace(DENSE, blocks="*-", layers=1)
    double = replace(single, blocks="*-/*-")
    joined = 2 * 2 * DENSE.hidden**2
    assert token_flops(double).total == 2 * token_flops(single).total + joined


def test_blocks_kept_in_bf16_take_bf16_time() -> None:
    shape = replace(DENSE, hidden=4096, ffn_hidden=16384, blocks="*-*-", layers=1)
    half, fp8_recipe = on_gpus(shape), replace(on_gpus(shape), fp8_recipe=Fp8Recipe.MXFP8)
    mixed, all_half = (replace(fp8_recipe, unquantised_blocks=blocks) for blocks in ("*-", "*-*-"))
    times = [iteration_seconds(s, gpus(s)).matmul for s in (fp8_recipe, mixed, all_half, half)]
    assert times[0] < times[1] < times[2] == pytest.approx(times[3])
    assert times[1] == pytest.approx((times[0] + times[2]) / 2)


PATTERN = "M*-ME"
HYBRID_ARGS = f"""--num-layers 5
--hidden-size 512
--num-attention-heads 8
--seq-length 1024
--max-position-embeddings 1024
--micro-batch-size 1
--global-batch-size 8
--num-experts 4
--mamba-num-groups 2
--hybrid-layer-pattern {PATTERN}
--bf16
"""


def planned(file: Path, *flags: str) -> Request:
    file.write_text(HYBRID_ARGS)
    arguments = ["--model", str(file), "--gpus", "4", "--gpu", "h100", *flags]
    return build_request(asked_of_plan(arguments))


def test_block_pattern_of_a_model_file_is_planned_without_pp_and_cp(tmp_path: Path) -> None:
    request = planned(tmp_path / "own.args")
    shape = request.template.shape
    assert (shape.layers, shape.blocks) == (1, PATTERN)
    splits = [candidate.spec.parallelism for candidate in search_configurations(request).ranked]
    assert splits
    assert {(split.pipeline, split.context) for split in splits} == {(1, 1)}
    assert max(split.tensor for split in splits) <= 2


def test_block_pattern_with_pp_or_cp_is_refused(tmp_path: Path) -> None:
    template = planned(tmp_path / "own.args").template
    for split, word in ((Parallelism(pipeline=2), "PP 1"), (Parallelism(context=2), "CP 1")):
        refused = find_violations(replace(template, parallelism=split))
        assert any(PATTERN in sentence and word in sentence for sentence in refused)


def test_refusal_of_an_unknown_block_lists_the_known_blocks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has the unknown block 'X'; use blocks of M \* - E / G"):
        planned(tmp_path / "own.args", "--extra", "--hybrid-layer-pattern M*X-")
    with pytest.raises(ValueError, match=r"linear attention \(G\), .*; use blocks of M \* - E /"):
        planned(tmp_path / "own.args", "--extra", "--hybrid-layer-pattern M*G-")
