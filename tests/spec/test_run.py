import pytest

from tools.spec.flags import Flags
from tools.spec.run import (
    DeviceKind,
    Recompute,
    StateTypes,
    flags_of_printed,
    flags_of_spec,
    recompute_flags,
    recompute_of,
    spec_of_flags,
    spec_of_printed,
    state_types_of,
)

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
LOCAL = [*SHAPE.split(), "--transformer-impl", "local"]


def test_without_transformer_engine_a_gpu_attends_on_sdpa_and_a_cpu_rank_keeps_scores() -> None:
    assert spec_of_flags(LOCAL, 1, DeviceKind.GPU).fused_attention
    assert not spec_of_flags(LOCAL, 1, DeviceKind.CPU).fused_attention


def test_a_foreign_log_with_megatrons_own_layers_keeps_scores() -> None:
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    printed = dict(zip(names, ("2", "64", "4", "64"), strict=True))
    for implementation, fused in (("local", False), ("transformer_engine", True)):
        spec = spec_of_printed(printed | {"transformer_impl": implementation})
        assert spec is not None
        assert spec.fused_attention is fused


def test_what_the_optimizer_is_stored_in_is_read_from_flags_and_logs_and_written_back() -> None:
    words = [
        "--use-precision-aware-optimizer",
        "--main-grads-dtype",
        "bf16",
        "--exp-avg-dtype",
        "fp8",
    ]
    spec = spec_of_flags([*SHAPE.split(), "--bf16", *words], 1, DeviceKind.GPU)
    assert spec.state_types == StateTypes(gradients="bf16", first_moment="fp8", aware=True)
    again = spec_of_flags([*SHAPE.split(), *flags_of_spec(spec)], 1, DeviceKind.GPU)
    assert again == spec
    printed = {"use_precision_aware_optimizer": "True", "exp_avg_dtype": "torch.bfloat16"}
    logged = Flags(flags_of_printed({**printed, "exp_avg_sq_dtype": "torch.uint8"}))
    assert state_types_of(logged) == StateTypes("", "", "bf16", "fp8", aware=True)
    halved = ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"]
    spec = spec_of_flags([*SHAPE.split(), "--bf16", *words, *halved], 1, DeviceKind.GPU)
    assert spec.state_types.offloaded == 0.5
    assert spec_of_flags([*SHAPE.split(), *flags_of_spec(spec)], 1, DeviceKind.GPU) == spec
    assert state_types_of(Flags([*words, "--optimizer-cpu-offload"])).offloaded == 1
    with pytest.raises(ValueError, match="offload-fraction nan is no share of the optimizer"):
        state_types_of(Flags([*words, *halved[:2], "nan"]))
    with pytest.raises(ValueError, match="offload needs --use-precision-aware-optimizer"):
        state_types_of(Flags(halved))
    with pytest.raises(ValueError, match="--exp-avg-dtype int3 is not one of Megatron's"):
        state_types_of(Flags([*words, "--exp-avg-dtype", "int3"]))


def test_modules_are_one_way_to_recompute_in_any_order() -> None:
    assert Recompute("mlp layernorm") is Recompute("layernorm mlp")
    assert Recompute("core_attn") is Recompute.SELECTIVE
    assert Recompute("mlp").modules == {"mlp"}
    assert str(Recompute("mlp layernorm")) == "layernorm mlp"
    assert list(Recompute) == ["none", "selective", "full"]
    with pytest.raises(ValueError, match="mpl"):
        Recompute("mpl")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", "none"),
        ("--recompute-modules mlp", "none"),  # A log prints them where nothing is recomputed.
        ("--recompute-activations", "selective"),
        ("--recompute-granularity selective", "selective"),
        ("--recompute-granularity full --recompute-modules mlp", "full"),
        (
            "--recompute-granularity selective --recompute-modules moe_act layernorm",
            "layernorm moe_act",
        ),
        ("--recompute-granularity selective --recompute-modules [moe_act mlp]", "mlp moe_act"),
        ("--moe-layer-recompute", "core_attn moe"),
    ],
)
def test_flags_recompute_these_modules_and_back(words: str, found: str) -> None:
    recompute = recompute_of(Flags(words.split()))
    assert recompute == found
    assert recompute_of(Flags(recompute_flags(recompute))) is recompute


def test_a_log_prints_modules_as_a_list() -> None:
    printed = {
        "recompute_granularity": "selective",
        "recompute_modules": "['layernorm', 'mla_up_proj']",
    }
    assert recompute_of(Flags(flags_of_printed(printed))) == "layernorm mla_up_proj"


def test_a_module_that_megatron_lacks_is_named() -> None:
    words = "--recompute-granularity selective --recompute-modules mlp norm"
    with pytest.raises(ValueError, match="norm is not one of Megatron's; use core_attn"):
        recompute_of(Flags(words.split()))
