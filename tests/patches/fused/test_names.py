import pytest

from megatron_patches.fusions import NAMES, dropped_flags, parse_fusions


def test_patch_names_have_a_fixed_order() -> None:
    assert parse_fusions(" adamw,norm , ,norm") == ("norm", "adamw")


def test_no_fused_patch_is_on_by_default() -> None:
    assert parse_fusions("") == ()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"no 'gelu'; it knows {NAMES[0]}, "):
        parse_fusions("norm,gelu")


def test_two_attention_kernels_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="attention_flash and attention_cudnn exclude each other"):
        parse_fusions("attention_cudnn,attention_flash")


def test_flags_that_disable_a_patch_are_dropped_only_with_this_patch() -> None:
    assert dropped_flags(("gradient_gemm",)) == ("--no-gradient-accumulation-fusion",)
    assert dropped_flags(("norm",)) == ()


def test_each_name_is_a_patch() -> None:
    from packaging.version import Version

    from megatron_patches.catalogue import PATCHES
    from megatron_patches.context import RuntimeContext

    off = RuntimeContext("gpu", Version("0.19"), False)
    for name in NAMES:
        on = RuntimeContext("gpu", Version("0.19"), False, (name,))
        added = {p.name for p in PATCHES if p.needed(on)} - {
            p.name for p in PATCHES if p.needed(off)
        }
        assert added == {f"fused {name}"}
