"""The text of PEFT= and what it means."""

import pytest

from parakit.config.peft import LORA_TARGETS, NF4_BITS, FrozenWeights, Lora, parse_peft


def test_lora_alone_takes_the_defaults_of_megatron_bridge() -> None:
    lora = parse_peft("lora")
    assert lora == Lora()
    assert lora.rank == 32
    assert lora.targets == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert lora.weights is FrozenWeights.BF16


def test_words_replace_defaults_and_targets_take_one_order() -> None:
    lora = parse_peft("lora weights=nf4 targets=linear_proj,linear_qkv rank=8")
    assert lora == Lora(8, ("linear_qkv", "linear_proj"), FrozenWeights.NF4)


def test_none_trains_all_weights() -> None:
    assert parse_peft("none") is None


@pytest.mark.parametrize("text", ["lora", "lora rank=4 weights=nf4", "lora targets=linear_q_proj"])
def test_the_text_of_a_lora_is_read_as_the_same_lora(text: str) -> None:
    lora = parse_peft(text)
    assert parse_peft(str(lora)) == lora


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dora", "There is no fine-tuning 'dora'; use lora or none."),
        ("none rank=3", "There is no fine-tuning 'none'; use lora or none."),
        ("lora rnk=3", "'rnk=3' says nothing of LoRA; use rank=16, "),
        ("lora rank=3 rank=4", "'rank=4' says nothing of LoRA"),
        ("lora rank=0", "LoRA's rank 0 is not a whole number above 0."),
        ("lora rank=x", "LoRA's rank x is not a whole number above 0."),
        ("lora targets=q_proj", "LoRA has no target 'q_proj'; use some of linear_qkv, "),
        ("lora weights=int8", "Frozen weights cannot be in 'int8'; use bf16 or nf4."),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + sentence.replace(".", r"\.")):
        parse_peft(text)


def test_targets_are_the_linear_layers_of_attention_and_mlp() -> None:
    assert len(set(LORA_TARGETS)) == 9


def test_a_weight_in_nf4_has_the_bits_of_qlora() -> None:
    # Four bits, and 0.127 bits of doubly quantised scales (arXiv:2305.14314 section 3).
    assert pytest.approx(4.127, abs=0.0005) == NF4_BITS
