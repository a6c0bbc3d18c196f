"""The distance between two engines' log probabilities."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from parakit.logprob import TokenLogProbabilities, measure_gap

NATS = arrays(np.float64, (2, 5), elements=st.floats(-30, 0))


def score(nats: list[list[float]], scored: list[list[bool]] | None = None) -> TokenLogProbabilities:
    values = np.array(nats, np.float64)
    marks = np.ones(values.shape, bool) if scored is None else np.array(scored)
    return TokenLogProbabilities(values, marks)


def test_gap_of_known_differences() -> None:
    gap = measure_gap(score([[-1.0, -2.0], [-3.0, -4.0]]), score([[-1.5, -2.0], [-2.0, -4.0]]))
    assert gap.mean_abs_nats == pytest.approx((0.5 + 1.0) / 4)
    expected = (math.exp(0.5) - 1.5 + math.exp(-1.0)) / 4
    assert gap.kl_nats == pytest.approx(expected)
    assert (gap.worst_sequence, gap.worst_position) == (1, 0)
    assert (gap.worst_training_nats, gap.worst_serving_nats) == (-3.0, -2.0)
    assert gap.relative_error == pytest.approx(math.sqrt(1.25) / math.sqrt(30))


@given(NATS)
def test_equal_log_probabilities_have_no_gap(nats: np.ndarray) -> None:
    gap = measure_gap(score(nats.tolist()), score(nats.tolist()))
    assert gap.kl_nats == gap.mean_abs_nats == gap.relative_error == 0


@given(NATS, NATS)
def test_kl_is_never_negative_and_the_worst_token_bounds_all(
    training: np.ndarray, serving: np.ndarray
) -> None:
    gap = measure_gap(score(training.tolist()), score(serving.tolist()))
    worst = abs(gap.worst_training_nats - gap.worst_serving_nats)
    assert gap.kl_nats >= 0
    assert 0 <= gap.mean_abs_nats <= gap.p99_abs_nats + worst
    assert gap.p99_abs_nats <= worst + 1e-12


@given(st.integers(0, 200))
def test_the_estimate_is_the_kl_if_serving_sampled_the_tokens(seed: int) -> None:
    random = np.random.default_rng(seed)
    serving, training = (random.dirichlet(np.ones(4)) + 1e-3 for _ in range(2))
    serving, training = serving / serving.sum(), training / training.sum()
    # Each token occurs as often as the serving engine samples it.
    num_tokens = np.round(serving * 20000).astype(int)
    tokens = np.repeat(np.arange(4), num_tokens)
    gap = measure_gap(score([np.log(training)[tokens]]), score([np.log(serving)[tokens]]))
    kl = float((serving * np.log(serving / training)).sum())
    assert gap.kl_nats == pytest.approx(kl, abs=0.02 * (1 + kl))


def test_tokens_of_the_prompt_do_not_count() -> None:
    training = score([[-9.0, -1.0]], [[False, True]])
    gap = measure_gap(training, score([[-1.0, -1.0]]))
    assert (gap.mean_abs_nats, gap.num_tokens) == (0, 1)


def test_a_token_of_probability_zero_gives_a_large_but_finite_gap() -> None:
    gap = measure_gap(score([[-1.0]]), score([[-math.inf]]))
    assert gap.mean_abs_nats == 99
    assert gap.kl_nats == pytest.approx(math.exp(20), rel=1e-3)
    assert gap.relative_error == 99
    both = measure_gap(score([[-math.inf, -1.0]]), score([[-3e38, -2.0]]))
    assert (both.mean_abs_nats, both.relative_error) == (0.5, pytest.approx(0.01, rel=1e-3))


def test_other_sequences_are_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"\[1, 1\].*\[1, 2\]"):
        measure_gap(score([[-1.0]]), score([[-1.0, -2.0]]))
    with pytest.raises(ValueError, match="No token was scored by both"):
        measure_gap(score([[-1.0]], [[False]]), score([[-1.0]]))
    with pytest.raises(ValueError, match="both must be"):
        TokenLogProbabilities(np.zeros((1, 2)), np.ones((1, 3), bool))


def test_a_file_gives_the_same_arrays_and_a_file_without_them_is_refused(tmp_path: Path) -> None:
    scores = score([[-1.0, -2.0]], [[False, True]])
    scores.write(tmp_path / "scores.npz")
    read = TokenLogProbabilities.read(tmp_path / "scores.npz")
    assert np.array_equal(read.nats, scores.nats)
    assert np.array_equal(read.is_scored, scores.is_scored)
    np.savez(tmp_path / "other.npz", nats=scores.nats)
    with pytest.raises(ValueError, match="lacks the array is_scored"):
        TokenLogProbabilities.read(tmp_path / "other.npz")
