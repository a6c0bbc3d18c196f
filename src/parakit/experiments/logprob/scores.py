"""Read tokens and their log probabilities from a capture of Megatron's forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.capture import LOSS, MODEL, PER_TOKEN_LOSS, CaptureStage, TensorKey
from parakit.logprob import TokenLogProbabilities
from parakit.verify import Capture, VerifyError, read_capture, reassemble_to_one_rank


@dataclass(frozen=True)
class ScoredCapture:
    """A capture of one rank, with the tokens that it scored."""

    capture: Capture
    tokens: NDArray[np.int64]
    """Inputs of the model, [sequences, positions]."""
    nats: NDArray[np.float64]
    """Log probability of each label, as the trainer reports it: minus the loss per token, in the same shape."""

    def select(self, prompt_tokens: int) -> TokenLogProbabilities:
        """Return the log probabilities of all next tokens that are in the sequences; those of the prompt are unscored.

        The label of the last position is no token of the sequence, so it is left out.
        """
        nats = self.nats[:, :-1]
        is_scored = np.zeros(nats.shape, bool)
        is_scored[:, prompt_tokens - 1 :] = True
        return TokenLogProbabilities(nats, is_scored)


def read_scored_capture(folder: Path, joined: Path) -> ScoredCapture:
    """Read the capture of all ranks in `folder`, and join it to one rank in the folder `joined` if it has several.

    Raises:
        VerifyError: The capture is incomplete, or has no tokens or no loss per token.
    """
    capture = read_capture(folder)
    if len(capture.ranks) > 1:
        capture = reassemble_to_one_rank(capture, None, joined)
    tokens = _join_micro_batches(
        capture, CaptureStage.INPUTS, MODEL, ("input.input_ids", "input.0")
    )
    losses = _join_micro_batches(capture, CaptureStage.LOSS, LOSS, (PER_TOKEN_LOSS,))
    return ScoredCapture(capture, tokens.astype(np.int64), -losses.astype(np.float64))


def _join_micro_batches(
    capture: Capture, stage: CaptureStage, name: str, slots: Iterable[str]
) -> NDArray[np.generic]:
    """Return a tensor [micro batch, positions] of all micro batches, one after another.

    Raises:
        VerifyError: The capture has none of the slots.
    """
    rank = capture.ranks[0]
    for slot in slots:
        arrays = []
        for micro_batch in range(rank.rank.micro_batches):
            record = rank.first_records.get(TensorKey(stage, name, slot, micro_batch))
            if record is not None:
                arrays.append(rank.values(record))
        if arrays:
            return np.concatenate(arrays)
    raise VerifyError(
        f"{capture.folder} lacks {name} {next(iter(slots))}, so its tokens cannot be scored."
    )
