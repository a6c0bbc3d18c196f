"""Gated delta nets in place of attention, compared with what Megatron printed.

Megatron core_v0.19.0 on CPU ranks, `pretrain_gpt.py` with its own layers in place of Transformer
Engine's and PyTorch's products in place of flash-linear-attention's: parameters a rank as printed, FLOPs
as `num_floating_point_operations` returned them for 4 sequences.
"""

from dataclasses import replace

import pytest

from parakit.config.model import LINEAR, LinearAttention, ModelShape
from parakit.config.run import DeviceKind, RunSpec, spec_from_flags
from parakit.costs.flops import model_flops, token_flops
from parakit.costs.tensors import rank_parameters, rank_tensors, total_parameters

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2"
    " --max-position-embeddings 64 --vocab-size 50257"
)
HEADS = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16"
    " --linear-value-head-dim 16"
)
BARE = "--swiglu --disable-bias-linear --normalization RMSNorm"


def linear(every: str, further_flags: str = "", ranks: int = 1) -> RunSpec:
    variant = f"--experimental-attention-variant gated_delta_net --linear-attention-freq {every}"
    return spec_from_flags(
        f"{TINY} {variant} {HEADS} {further_flags}".split(), ranks, DeviceKind.CPU
    )


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (linear("2"), [3_425_232]),
        (linear("2", "--swiglu"), [3_392_464]),
        (linear("[1,1,0,1]", f"{BARE} --tensor-model-parallel-size 2", 2), [1_702_012]),
        (
            linear(
                "4",
                "--swiglu --num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1,1,1]"
                " --moe-ffn-hidden-size 32 --pipeline-model-parallel-size 2"
                " --untie-embeddings-and-output-weights",
                2,
            ),
            [3_309_204, 3_304_880],
        ),
    ],
)
def test_a_rank_has_the_parameters_that_megatron_printed(spec: RunSpec, wanted: list[int]) -> None:
    assert [rank_parameters(spec, rank).total for rank in range(len(wanted))] == wanted
    assert [sum(rank_tensors(spec, rank)) for rank in range(len(wanted))] == wanted


def test_an_iteration_has_the_flops_that_megatron_counts() -> None:
    assert model_flops(linear("2", "--swiglu").shape, 4) == 5_225_054_208
    # Megatron pads the vocabulary for TP; the kit counts FLOPs with the padding of a single device.
    tensor = linear("[1,1,0,1]", f"{BARE} --tensor-model-parallel-size 2", 2).shape
    assert model_flops(replace(tensor, vocabulary_multiple=256), 4) == 5_239_209_984


def test_flops_per_token_of_linear_attention_do_not_depend_on_sequence_length() -> None:
    shape = linear("[1,1,1,1]").shape
    assert token_flops(shape, 64) == token_flops(shape, 128)
    assert token_flops(shape).attention_scores == 0


def test_linear_attention_block_of_a_hybrid_equals_that_of_a_layer() -> None:
    layers = linear("[1,1,1,1]", BARE).shape
    assert layers.layer_kinds[1][0].blocks == "G-"
    hybrid = linear("4", f"{BARE} --hybrid-layer-pattern G-G-G-G-").shape
    assert (hybrid.layers, hybrid.blocks) == (1, 4 * f"{LINEAR}-")
    assert hybrid.linear == layers.linear == LinearAttention(2, 16, 4, 16, 4)
    assert total_parameters(hybrid) == total_parameters(layers)
    assert token_flops(hybrid) == token_flops(layers)


def of(every: str) -> ModelShape:
    return linear(every).shape


def test_attention_layers_are_set_by_a_period_or_a_list() -> None:
    assert of("2").linear_layers == of("[1,0]*2").linear_layers == (0, 2)
    assert of("4").linear_layers == (0, 1, 2)
    assert of("1").linear_layers == ()
    with pytest.raises(
        ValueError, match=r"--linear-attention-freq \[1,0\] is .* list for 4 layers"
    ):
        of("[1,0]")
