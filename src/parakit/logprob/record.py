"""Record the tokens that an engine has generated, with the log probabilities that it reports for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.io import atomic_write


def record_tokens(
    path: str | Path,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    log_probabilities: Sequence[Sequence[float]],
) -> None:
    """Write what an engine has generated to a file that `make verify-logprob SERVE=<file>` reads.

    Any engine can call this function. Shorter sequences are filled up with the token 0, which is not compared.

    Args:
        path: File to write, in NumPy's format `.npz`.
        prompts: Token ids of each prompt, at least one per prompt.
        completions: Token ids that the engine has generated after each prompt.
        log_probabilities: Natural logarithm of the probability of each generated token.

    Raises:
        ValueError: A prompt is empty, or the three lists do not belong together.
    """
    if not len(prompts) == len(completions) == len(log_probabilities) > 0:
        raise ValueError(
            f"There are {len(prompts)} prompts, {len(completions)} completions and {len(log_probabilities)} lists of "
            "log probabilities; give one of each per sequence."
        )
    length = max(
        len(prompt) + len(completion)
        for prompt, completion in zip(prompts, completions, strict=True)
    )
    tokens = np.zeros((len(prompts), length), np.int64)
    nats = np.zeros((len(prompts), length - 1))
    is_scored = np.zeros(nats.shape, bool)
    for row, (prompt, completion, values) in enumerate(
        zip(prompts, completions, log_probabilities, strict=True)
    ):
        if not prompt or len(completion) != len(values):
            raise ValueError(
                f"Sequence {row} has {len(prompt)} prompt tokens, {len(completion)} generated tokens and "
                f"{len(values)} log probabilities; give a prompt, and one log probability per generated token."
            )
        end = len(prompt) + len(completion)
        tokens[row, :end] = [*prompt, *completion]
        # The log probability at position t is that of the token t + 1.
        nats[row, len(prompt) - 1 : end - 1] = values
        is_scored[row, len(prompt) - 1 : end - 1] = True
    with atomic_write(Path(path)) as file:
        np.savez(file, tokens=tokens, nats=nats, is_scored=is_scored)


def read_recorded_tokens(path: Path) -> NDArray[np.int64]:
    """Return the tokens [sequences, positions] of a file that `record_tokens` wrote.

    Raises:
        ValueError: The file has no tokens.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tokens: NDArray[np.int64] = arrays["tokens"].astype(np.int64)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} holds no recorded tokens ({error}); write it with parakit.record_tokens."
        ) from None
    return tokens
