"""Measure how far the log probabilities of two engines are apart, token by token.

Both engines scored the same tokens: the trainer, and the engine that serves the model. Everything here is arithmetic on
the log probability of each token, which every engine can report. No logits are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.io import atomic_write

_LEAST_NATS = -100.0
"""Log probability that counts for every smaller one, such as that of a token that truncated sampling excludes."""
_LARGEST_EXPONENT = 20.0
"""Largest difference in nats that enters the estimate of KL, so that an excluded token does not make it infinite."""


@dataclass(frozen=True)
class TokenLogProbabilities:
    """The log probabilities that one engine reports for the tokens of some sequences."""

    nats: NDArray[np.float64]
    """Natural logarithm of each token's probability, [sequences, positions]."""
    is_scored: NDArray[np.bool_]
    """True for the tokens that are compared, in the same shape. Tokens of the prompt are not compared."""

    def __post_init__(self) -> None:
        if self.nats.shape != self.is_scored.shape or self.nats.ndim != 2:
            raise ValueError(
                f"The log probabilities have the shape {list(self.nats.shape)} and the marks of scored tokens "
                f"{list(self.is_scored.shape)}; both must be [sequences, positions]."
            )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file that `write` wrote.

        Raises:
            ValueError: The file lacks an array, or the arrays have other shapes.
        """
        with np.load(path, allow_pickle=False) as arrays:
            missing = sorted({"nats", "is_scored"} - set(arrays))
            if missing:
                raise ValueError(
                    f"{path} lacks the array {missing[0]}; write it with `record_tokens`."
                )
            return cls(arrays["nats"].astype(np.float64), arrays["is_scored"].astype(bool))

    def write(self, path: Path) -> None:
        """Write both arrays to a file of NumPy's format `.npz`."""
        with atomic_write(path) as file:
            np.savez(file, nats=self.nats, is_scored=self.is_scored)


@dataclass(frozen=True)
class Gap:
    """The distance between the log probabilities of a trainer and of a serving engine."""

    mean_abs_nats: float
    """Average of the absolute differences over all scored tokens."""
    p99_abs_nats: float
    """99th percentile of the absolute differences."""
    kl_nats: float
    """Estimate of KL(serving ‖ training) per token: the average of exp(d) − 1 − d, where d is training minus serving.

    The estimate is unbiased if the serving engine sampled the tokens. For other tokens it is a distance that is 0 only
    if all log probabilities are equal.
    """
    worst_sequence: int
    worst_position: int
    """Index of the scored token with the largest absolute difference."""
    worst_training_nats: float
    worst_serving_nats: float
    num_tokens: int
    relative_error: float
    """Norm of the differences over the norm of the trainer's log probabilities. Tolerances of rounding limit it."""


def measure_gap(training: TokenLogProbabilities, serving: TokenLogProbabilities) -> Gap:
    """Return the distance between two engines' log probabilities of the same tokens.

    Tokens are compared if both engines have scored them. Log probabilities below `_LEAST_NATS` count as this value.

    Raises:
        ValueError: The shapes differ, or no token is scored by both.
    """
    if training.nats.shape != serving.nats.shape:
        raise ValueError(
            f"The trainer scored tokens [sequences, positions] = {list(training.nats.shape)} and the serving engine "
            f"{list(serving.nats.shape)}; give both the same sequences."
        )
    is_compared = training.is_scored & serving.is_scored
    if not is_compared.any():
        raise ValueError("No token was scored by both engines; score the same positions in both.")
    differences = subtract(training, serving)
    compared = np.abs(differences[is_compared])
    flat_worst = np.argmax(np.where(is_compared, np.abs(differences), -1.0))
    sequence, position = np.unravel_index(flat_worst, differences.shape)
    return Gap(
        mean_abs_nats=float(compared.mean()),
        p99_abs_nats=float(np.percentile(compared, 99)),
        kl_nats=float(estimate_kl(differences[is_compared]).mean()),
        worst_sequence=int(sequence),
        worst_position=int(position),
        worst_training_nats=float(training.nats[sequence, position]),
        worst_serving_nats=float(serving.nats[sequence, position]),
        num_tokens=int(is_compared.sum()),
        relative_error=_divide_norms(compared, training.nats[is_compared]),
    )


def _divide_norms(differences: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Return the norm of the differences over the norm of the values.

    If all values are 0, the result is 0 for differences of 0, and infinite for others.
    """
    norm = float(np.linalg.norm(_clip_nats(values)))
    difference_norm = float(np.linalg.norm(differences))
    if norm == 0:
        return np.inf if difference_norm else 0.0
    return difference_norm / norm


def subtract(
    training: TokenLogProbabilities, serving: TokenLogProbabilities
) -> NDArray[np.float64]:
    """Return training minus serving per token, with `_LEAST_NATS` for all smaller log probabilities."""
    differences: NDArray[np.float64] = _clip_nats(training.nats) - _clip_nats(serving.nats)
    return differences


def _clip_nats(nats: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log probabilities, with `_LEAST_NATS` in place of each smaller log probability."""
    limited: NDArray[np.float64] = np.maximum(nats, _LEAST_NATS)
    return limited


def estimate_kl(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exp(d) − 1 − d per token, which is never negative (the estimator k3 of J. Schulman).

    In the exponential, d is at most `_LARGEST_EXPONENT`.
    """
    exponentials = np.expm1(np.minimum(differences, _LARGEST_EXPONENT))
    estimates: NDArray[np.float64] = np.maximum(exponentials - differences, 0.0)
    return estimates
