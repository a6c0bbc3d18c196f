from dataclasses import replace

import pytest

from parakit.config.flags import Flags
from parakit.config.model import load_model
from parakit.config.recompute import Recompute, parse_recompute, recompute_flags
from parakit.config.run import (
    DeviceKind,
    RunSpec,
    StateTypes,
    flags_from_printed_arguments,
    flags_from_spec,
    parse_state_types,
    spec_from_flags,
    spec_from_printed_arguments,
)
from parakit.config.stages import StageSplit
from parakit.config.strategy import Batch, Parallelism

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
LOCAL = [*SHAPE.split(), "--transformer-impl", "local"]


def test_gpu_without_transformer_engine_uses_sdpa_and_cpu_rank_stores_attention_scores() -> None:
    assert spec_from_flags(LOCAL, 1, DeviceKind.GPU).fused_attention
    assert not spec_from_flags(LOCAL, 1, DeviceKind.CPU).fused_attention


def test_foreign_log_with_local_layers_stores_attention_scores() -> None:
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    printed = dict(zip(names, ("2", "64", "4", "64"), strict=True))
    for implementation, fused in (("local", False), ("transformer_engine", True)):
        spec = spec_from_printed_arguments(printed | {"transformer_impl": implementation})
        assert spec is not None
        assert spec.fused_attention is fused


def test_pipeline_layout_flag_replaces_the_virtual_stage_flag() -> None:
    shape = [*SHAPE.split(), "--num-layers", "6"]
    layout = ["--pipeline-model-parallel-layout", "Ett|t|tt|tL"]
    flags = [*shape, "--pipeline-model-parallel-size", "2", *layout]
    spec = spec_from_flags(flags, 2, DeviceKind.GPU)
    assert [spec.layers_per_chunk(rank) for rank in (0, 1)] == [(2, 2), (1, 1)]
    written = flags_from_spec(spec)
    assert "--num-virtual-stages-per-pipeline-rank" not in written
    assert spec_from_flags([*shape, *written], 2, DeviceKind.GPU) == spec


def test_optimizer_state_types_are_read_from_flags_and_logs_and_written_back() -> None:
    flags = [
        "--use-precision-aware-optimizer",
        "--main-grads-dtype",
        "bf16",
        "--exp-avg-dtype",
        "fp8",
    ]
    spec = spec_from_flags([*SHAPE.split(), "--bf16", *flags], 1, DeviceKind.GPU)
    assert spec.state_types == StateTypes(
        gradients="bf16", first_moment="fp8", precision_aware=True
    )
    again = spec_from_flags([*SHAPE.split(), *flags_from_spec(spec)], 1, DeviceKind.GPU)
    assert again == spec
    printed = {"use_precision_aware_optimizer": "True", "exp_avg_dtype": "torch.bfloat16"}
    logged = Flags(flags_from_printed_arguments({**printed, "exp_avg_sq_dtype": "torch.uint8"}))
    assert parse_state_types(logged) == StateTypes("", "", "bf16", "fp8", precision_aware=True)
    halved = ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"]
    spec = spec_from_flags([*SHAPE.split(), "--bf16", *flags, *halved], 1, DeviceKind.GPU)
    assert spec.state_types.offloaded_fraction == 0.5
    assert spec_from_flags([*SHAPE.split(), *flags_from_spec(spec)], 1, DeviceKind.GPU) == spec
    assert parse_state_types(Flags([*flags, "--optimizer-cpu-offload"])).offloaded_fraction == 1
    with pytest.raises(ValueError, match="offload-fraction nan is no fraction of the optimizer"):
        parse_state_types(Flags([*flags, *halved[:2], "nan"]))
    with pytest.raises(ValueError, match="offload needs --use-precision-aware-optimizer"):
        parse_state_types(Flags(halved))
    with pytest.raises(ValueError, match="does not know the value int3 of --exp-avg-dtype"):
        parse_state_types(Flags([*flags, "--exp-avg-dtype", "int3"]))


def test_recomputed_modules_are_equal_in_any_order() -> None:
    assert Recompute.parse("mlp layernorm") == Recompute.parse("layernorm mlp")
    assert Recompute.parse("core_attn") == Recompute.SELECTIVE
    assert Recompute.parse("mlp").modules == {"mlp"}
    assert str(Recompute.parse("mlp layernorm")) == "layernorm mlp"
    with pytest.raises(ValueError, match="mpl"):
        Recompute.parse("mpl")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "none"),
        (
            "--recompute-modules mlp",
            "none",
        ),  # A log prints these arguments even if nothing is recomputed.
        ("--recompute-activations", "selective"),
        ("--recompute-granularity selective", "selective"),
        ("--recompute-granularity full --recompute-modules mlp", "full"),
        (
            "--recompute-granularity selective --recompute-modules moe_act layernorm",
            "layernorm moe_act",
        ),
        ("--recompute-granularity selective --recompute-modules [moe_act mlp]", "mlp moe_act"),
        ("--moe-layer-recompute", "core_attn moe"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "full",
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
            "full uniform 3",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            "full block 1",
        ),
    ],
)
def test_recompute_flags_are_parsed_and_written_back(flags: str, expected: str) -> None:
    recompute = parse_recompute(Flags(flags.split()))
    assert str(recompute) == expected
    assert parse_recompute(Flags(recompute_flags(recompute))) == recompute


def test_a_log_prints_modules_as_a_list() -> None:
    printed = {
        "recompute_granularity": "selective",
        "recompute_modules": "['layernorm', 'mla_up_proj']",
    }
    assert (
        str(parse_recompute(Flags(flags_from_printed_arguments(printed))))
        == "layernorm mla_up_proj"
    )


@pytest.mark.parametrize(
    ("recompute", "checkpoints"),
    [
        ("none", ()),
        ("mlp", ()),
        ("full", (1, 1, 1, 1, 1)),
        ("full uniform 1", (1, 1, 1, 1, 1)),
        ("full uniform 2", (2, 2, 1)),
        ("full uniform 9", (5,)),
        ("full block 2", (1, 1)),
        ("full block 9", (1, 1, 1, 1, 1)),
    ],
)
def test_recomputed_groups_are_counted_from_the_first_layer(
    recompute: str, checkpoints: tuple[int, ...]
) -> None:
    assert Recompute.parse(recompute).layers_per_checkpoint(5) == checkpoints
    assert Recompute.parse(recompute).layers_per_checkpoint(0) == ()


def test_full_recomputation_accepts_only_methods_of_megatron() -> None:
    assert Recompute.parse("full uniform 1") == Recompute.FULL
    assert Recompute.parse("full uniform 2") == Recompute(method="uniform", layers=2)
    for wrong in ("full block", "full block 0", "full even 2", "block 2"):
        with pytest.raises(ValueError, match=wrong):
            Recompute.parse(wrong)
    flags = "--recompute-granularity full --recompute-method even --recompute-num-layers 2"
    with pytest.raises(ValueError, match=r"--recompute-method even .*; use uniform or block"):
        parse_recompute(Flags(flags.split()))


def test_block_method_recomputes_the_first_layers_of_each_virtual_stage() -> None:
    split = Parallelism(pipeline=2, virtual_stages=2)
    shape = replace(load_model("gpt2-tiny").shape, layers=14)
    stages = StageSplit(embedding=True, loss=True)
    spec = RunSpec(shape, split, Batch(1, 4), stages=stages)
    assert spec.layers_per_chunk(0) == (3, 4)
    again = [
        replace(spec, recompute=Recompute.parse(f"full block {n}")).num_recomputed_layers(0)
        for n in (1, 4)
    ]
    assert again == [2, 7]
    assert replace(spec, recompute=Recompute.parse("full uniform 4")).num_recomputed_layers(0) == 7


def test_a_module_that_megatron_lacks_is_named() -> None:
    flags = "--recompute-granularity selective --recompute-modules mlp norm"
    with pytest.raises(
        ValueError, match="does not know the value norm of --recompute-modules; use core_attn"
    ):
        parse_recompute(Flags(flags.split()))
