from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.config.files import ROOT
from parakit.config.hardware import device_by_key
from parakit.config.model import load_model
from parakit.config.published import Figure
from parakit.config.recompute import Recompute
from parakit.costs.flops import flops_by_convention, mfu, model_flops, token_flops
from parakit.planner.readings.published import h200_figures, h200_spec
from tests.planner.conftest import TINY as TINY_OF_FOUR

GUIDE = (ROOT / "examples/gpt3/README.md").read_text(encoding="utf-8")

TINY = replace(TINY_OF_FOUR, layers=2, query_groups=2)


def test_gpt2_large_has_the_published_flops_per_iteration() -> None:
    shape = load_model("gpt2-large").shape
    assert model_flops(shape, 32) == 161_093_485_854_720
    assert model_flops(shape, 64) == 2 * model_flops(shape, 32)


def test_the_published_baseline_reaches_its_published_utilisation() -> None:
    flops = model_flops(load_model("gpt2-large").shape, 32)
    assert mfu(flops, 0.4375, 1, 989.5e12) == pytest.approx(0.372, abs=0.0005)


@pytest.mark.parametrize("figure", h200_figures(), ids=lambda figure: figure.strategy)
def test_rates_in_the_guide_follow_from_the_time_of_the_published_run(figure: Figure) -> None:
    (row,) = (
        line for line in GUIDE.splitlines() if f"`train-{figure.strategy}-gpt2-large-" in line
    )
    _, _, batch, milliseconds, _, tflops, share = (
        cell.strip() for cell in row.strip("|").split("|")
    )
    samples, peak = int(batch.partition("/")[2]), device_by_key("h200").peak_flops("fp16")
    flops = model_flops(load_model("gpt2-large").shape, samples)
    assert figure.mean_iteration_ms is not None
    assert peak is not None
    seconds = figure.mean_iteration_ms / 1e3
    assert milliseconds == f"{figure.mean_iteration_ms:.1f}"
    assert tflops == f"{flops / seconds / figure.devices / 1e12:.1f}"
    assert share == f"{mfu(flops, seconds, figure.devices, peak):.1%}"


def test_every_matrix_of_a_tiny_model_is_counted_once() -> None:
    flops = token_flops(TINY)
    assert flops.attention_projections == 2 * 2 * (8 * (8 + 4 + 4) + 8 * 8)
    assert flops.attention_scores == 2 * (2 * 2 * 8 * 16) // 2
    assert flops.mlp == 2 * 2 * (8 * 32 + 32 * 8)
    assert flops.router == 0
    assert flops.logits == 2 * 8 * 104
    assert model_flops(TINY, 3) == 3 * 3 * 16 * flops.total


def test_a_gated_mlp_has_three_matrices() -> None:
    assert token_flops(replace(TINY, gated=True)).mlp * 2 == token_flops(TINY).mlp * 3


def test_only_experts_with_routed_tokens_count() -> None:
    moe = replace(TINY, experts=8, experts_per_token=2, expert_ffn_hidden=32)
    assert token_flops(moe).mlp == 2 * token_flops(TINY).mlp
    assert token_flops(moe).router == 2 * 2 * 8 * 8


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 4))
def test_the_sum_is_the_published_closed_form(hidden64: int, layers: int, samples: int) -> None:
    hidden = 64 * hidden64
    shape = replace(
        TINY,
        layers=layers,
        hidden=hidden,
        heads=8,
        query_groups=8,
        head_width=hidden // 8,
        ffn_hidden=4 * hidden,
        seq_length=128,
    )
    tokens, vocabulary = samples * 128, shape.padded_vocabulary()
    square = layers * hidden * hidden
    closed = 48 * square + 24 * square + 6 * layers * hidden * 128 + 6 * hidden * vocabulary
    assert model_flops(shape, samples) == tokens * closed


def test_flops_by_conventions_of_other_trainers() -> None:
    spec = replace(h200_spec("dp2"), recompute=Recompute.FULL)
    flops = token_flops(spec.shape)
    layers = flops.total - flops.logits
    assert flops_by_convention(spec, ()) == 3 * flops.total
    assert flops_by_convention(spec, {"whole-attention"}) == 3 * (
        flops.total + flops.attention_scores
    )
    assert flops_by_convention(spec, {"no-vocabulary"}) == 3 * layers
    assert flops_by_convention(spec, {"recomputed"}) == 3 * flops.total + layers
    scores = replace(spec, recompute=Recompute.SELECTIVE)
    assert flops_by_convention(scores, {"recomputed"}) == 3 * flops.total + flops.attention_scores


def test_scores_of_a_window_are_those_of_its_tokens() -> None:
    plain = load_model("gpt2-tiny").shape
    half = replace(plain, window=3, windowed_fraction=0.5)
    per_key = 2 * plain.layers * plain.heads * plain.head_width
    assert token_flops(plain, 8).attention_scores == per_key * 8
    assert token_flops(half, 8).attention_scores == round(per_key * (8 + 5.25) / 2)
    assert model_flops(plain, 1, 8) - model_flops(half, 1, 8) == round(3 * 8 * per_key * 1.375)
