"""The file that any engine records."""

from pathlib import Path

import numpy as np
import pytest

import parakit
from parakit.logprob import TokenLogProbabilities, read_recorded_tokens


def test_recorded_tokens_are_read_with_the_log_probability_before_each_generated_token(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens.npz"
    parakit.record_tokens(path, [[1, 2], [3]], [[4, 5], [6]], [[-0.5, -0.25], [-2.0]])
    assert read_recorded_tokens(path).tolist() == [[1, 2, 4, 5], [3, 6, 0, 0]]
    scores = TokenLogProbabilities.read(path)
    assert scores.is_scored.tolist() == [[False, True, True], [True, False, False]]
    assert scores.nats[scores.is_scored].tolist() == [-0.5, -0.25, -2.0]


def test_lists_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npz"
    with pytest.raises(ValueError, match="1 prompts, 0 completions"):
        parakit.record_tokens(path, [[1]], [], [])
    with pytest.raises(ValueError, match="Sequence 0 has 0 prompt tokens"):
        parakit.record_tokens(path, [[]], [[1]], [[-1.0]])
    with pytest.raises(ValueError, match="2 generated tokens and 1 log probabilities"):
        parakit.record_tokens(path, [[1]], [[1, 2]], [[-1.0]])
    assert not path.exists()


def test_a_file_without_tokens_is_refused_with_the_way_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", nats=np.zeros((1, 1)))
    for name in ("other.npz", "missing.npz"):
        with pytest.raises(ValueError, match=r"write it with parakit\.record_tokens"):
            read_recorded_tokens(tmp_path / name)
