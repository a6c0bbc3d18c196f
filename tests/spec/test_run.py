import pytest

from tools.spec.flags import Flags
from tools.spec.run import (
    DeviceKind,
    StateTypes,
    flags_of_printed,
    flags_of_spec,
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
