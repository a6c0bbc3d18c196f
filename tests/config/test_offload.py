import pytest

from parakit.config.flags import Flags
from parakit.config.offload import NO_OFFLOAD, Offload, offload_flags, parse_offload
from parakit.config.run import (
    DeviceKind,
    flags_from_printed_arguments,
    flags_from_spec,
    spec_from_flags,
)

FINE = "--fine-grained-activation-offloading"
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", NO_OFFLOAD),
        (
            "--offload-modules core_attn",
            NO_OFFLOAD,
        ),  # A log prints these arguments even if nothing is offloaded.
        ("--cpu-offloading-num-layers 3", Offload(layers=3)),
        # Modules are written in the order of the forward pass, whatever their order in the flags.
        (
            f"{FINE} --offload-modules attn_proj core_attn",
            Offload(modules=("core_attn", "attn_proj")),
        ),
        (
            f"--use-transformer-engine-op-fuser {FINE} --offload-modules fused_group_mlp",
            Offload(modules=("fused_group_mlp",)),
        ),
        (
            f"{FINE} --offload-modules [expert_fc1 moe_act]",
            Offload(modules=("expert_fc1", "moe_act")),
        ),
        (
            f"{FINE} --offload-modules moe_act --min-offloaded-tensor-size 9 "
            "--activation-offload-fraction 0.5 --delta-offload-bytes-across-pp-ranks 7",
            Offload(modules=("moe_act",), min_elements=9, fraction=0.5, kept_bytes_per_stage=7),
        ),
    ],
)
def test_offload_flags_are_parsed_and_written_back(flags: str, expected: Offload) -> None:
    offload = parse_offload(Flags(flags.split()))
    assert offload == expected
    assert parse_offload(Flags(offload_flags(offload))) == offload
    assert bool(offload) == (offload != NO_OFFLOAD)


def test_offload_of_a_run_is_in_its_flags_and_its_log() -> None:
    flags = [*SHAPE.split(), FINE, "--offload-modules", "qkv_linear", "core_attn"]
    spec = spec_from_flags(flags, 1, DeviceKind.GPU)
    assert parse_offload(Flags(flags_from_spec(spec))) == spec.offload
    printed = {
        "fine_grained_activation_offloading": "True",
        "offload_modules": "['core_attn', 'qkv_linear']",
        "cpu_offloading_num_layers": "0",
    }
    assert parse_offload(Flags(flags_from_printed_arguments(printed))) == spec.offload


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (FINE, "needs --offload-modules; use some of attn_norm"),
        (
            f"{FINE} --offload-modules mlp",
            "does not know the value mlp of --offload-modules; use attn_norm",
        ),
        (f"{FINE} --offload-modules fused_group_mlp", "needs --use-transformer-engine-op-fuser"),
        (
            f"{FINE} --offload-modules moe_act --activation-offload-fraction 2",
            "0 to 1 for --activation-offload-fraction",
        ),
        ("--cpu-offloading-num-layers -1", "is -1; use 0 or more"),
    ],
)
def test_offload_that_megatron_refuses_is_named(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_offload(Flags(flags.split()))
