"""Changes of one thing at a time: what they change, and that nothing is left of them."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from megatron_patches.logprob import changes
from megatron_patches.logprob.choices import ChoiceComparison, ServedChoices
from megatron_patches.logprob.passes import PassEdits
from parakit.artifacts.capture import CHOICE, CaptureStage, TensorKey


def test_top_k_keeps_the_largest_logits_alone() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.0, 0.0]]])
    kept = changes.keep_top_k(2, logits).softmax(-1)
    assert kept[0, 0].tolist() == pytest.approx([0, 1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0])
    assert torch.equal(changes.keep_top_k(9, logits), logits)


def test_top_p_keeps_the_smallest_set_that_reaches_the_probability() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()[None, None]
    assert changes.keep_top_p(0.6, logits).softmax(-1)[0, 0].tolist() == pytest.approx(
        [0.625, 0.375, 0]
    )
    assert changes.keep_top_p(0.4, logits).softmax(-1)[0, 0].tolist() == pytest.approx([1, 0, 0])


def test_rows_of_the_padding_get_no_probability() -> None:
    masked = changes.mask_padding(2, torch.zeros(1, 1, 4)).softmax(-1)
    assert masked[0, 0].tolist() == [0.5, 0.5, 0, 0]


def test_rotary_embedding_of_shifted_positions_is_that_of_the_next_positions() -> None:
    frequencies = changes.compute_frequencies(8, 10000.0)
    like = torch.zeros(4, 1, 1, 8)
    shifted = changes.make_rotary(frequencies, torch.arange(4).float() + 1, like)
    plain = changes.make_rotary(frequencies, torch.arange(5).float(), torch.zeros(5, 1, 1, 8))
    assert torch.equal(shifted, plain[1:])


def test_doubled_first_token_scores_each_token_at_its_own_index() -> None:
    edits = PassEdits()
    with changes.double_first_token(edits):
        inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[6, 7, 8]])}
        doubled = edits.inputs[0](inputs)
        assert doubled["input_ids"].tolist() == [[5, 5, 6]]
        assert doubled["labels"].tolist() == [[5, 6, 7]]
        assert edits.scores[0](np.array([[-1.0, -2.0, -3.0]])).tolist() == [[-2.0, -3.0, -3.0]]


def test_shifted_labels_are_the_tokens_further_on() -> None:
    edits = PassEdits()
    with changes.shift_labels(1, edits):
        inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[0, 0, 0]])}
        assert edits.inputs[0](inputs)["labels"].tolist() == [[7, 5, 6]]


def test_masks_of_documents_hide_later_tokens_and_other_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "use_masks", nullcontext)
    tokens = {"input_ids": torch.tensor([[1, 9, 2]])}
    apart, together = PassEdits(), PassEdits()
    with changes.attend_within_documents(9, apart), changes.attend_everywhere(together):
        visible = ~apart.inputs[0](tokens)["attention_mask"][0, 0]
        assert visible.int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        visible = ~together.inputs[0](tokens)["attention_mask"][0, 0]
        assert visible.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_epsilon_weights_and_dropout_are_as_before_after_a_change() -> None:
    norm, linear, dropout = nn.LayerNorm(2, eps=1e-5), nn.Linear(2, 2), nn.Dropout(0.5)
    before = linear.weight.detach().clone()
    with changes.set_epsilon([norm], 1e-6, PassEdits()):
        assert norm.eps == 1e-6
    with changes.replace_weights([(linear.weight, torch.zeros(2, 2))], PassEdits()):
        assert not linear.weight.any()
    with changes.switch_dropout_off(nn.Sequential(dropout), PassEdits()):
        assert not dropout.training
    assert norm.eps == 1e-5
    assert torch.equal(linear.weight, before)
    assert dropout.training


def test_a_module_computes_in_another_dtype_and_returns_its_own() -> None:
    linear, values = nn.Linear(3, 1, bias=False), torch.rand(1, 3)
    exact = linear(values)
    with changes.compute_in_dtype([linear], torch.bfloat16, PassEdits()):
        rounded = linear(values)
        assert linear.weight.dtype is torch.bfloat16
    assert rounded.dtype is torch.float32
    assert torch.equal(rounded, (values.bfloat16() @ linear.weight.bfloat16().T).float())
    assert torch.equal(linear(values), exact)


class Router(nn.Module):
    """A router with a linear gate, as Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 3))

    def gating(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T


def test_a_router_computes_its_logits_alone_in_another_dtype() -> None:
    router, hidden = Router(), torch.rand(2, 3)
    exact = router.gating(hidden)
    with changes.compute_router_logits_in([router], torch.bfloat16, PassEdits()):
        rounded = router.gating(hidden)
    assert rounded.dtype is torch.float32
    assert torch.equal(rounded, (hidden.bfloat16() @ router.weight.bfloat16().T).float())
    assert torch.equal(router.gating(hidden), exact)


class Stored:
    """A capture of the serving engine with the choices of one router."""

    def __init__(self, choice: torch.Tensor) -> None:
        self.choice = choice

    def get(self, _: TensorKey) -> torch.Tensor:
        return self.choice


def test_choices_of_the_serving_engine_are_counted_or_replayed() -> None:
    key = TensorKey(CaptureStage.OUTPUTS, "decoder.layers.0.mlp.router", CHOICE, 0)
    own_choice = torch.tensor([[True, True, False], [False, True, True]])
    served = torch.tensor([[True, False, True], [False, True, True]])
    comparison = ChoiceComparison(Stored(served))  # type: ignore[arg-type]
    assert comparison.choose(key, own_choice) is None
    assert (comparison.num_flips, comparison.num_choices) == (1, 4)
    replay = ServedChoices(Stored(served))  # type: ignore[arg-type]
    chosen = replay.choose(key, own_choice)
    assert chosen is not None
    assert torch.equal(chosen, served)
    assert replay.choose(key, own_choice[:1]) is None
