"""The request to score tokens instead of training: the file that `variables.LOGPROB` names."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from parakit.artifacts.io import atomic_write

SCORES_FILE = "scores.npz"
"""Log probabilities of one side, in the folder of its results (`TokenLogProbabilities.write`)."""
SEQUENCES_FILE = "sequences.npy"
"""Token ids of the sequences, [sequences, positions]."""
WHOLE_FOLDER, GENERATED_FOLDER = "whole", "generated"
"""Folders with a `SCORES_FILE` of the serving engine: of one forward pass per sequence, and of generation."""
TEXTS_FILE = "texts.json"
"""Text of each scored token by its number, if the served model has a tokenizer."""
EXPLAINED_FILE = "explained.json"
"""Result of the task `EXPLAIN`."""


class Task(StrEnum):
    """Work that a rank does in place of the first training step."""

    CAPTURE = "capture"
    """Score the trainer's own micro batches, and capture the tensors of every module."""
    EXPLAIN = "explain"
    """Change one thing at a time on one rank, and measure the gap to the serving engine again."""
    GENERATE = "generate"
    """Feed the sequences token by token through Megatron's inference path with a KV cache."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the ranks of a launch."""

    task: Task
    folder: str
    """Folder of the results."""
    num_probes: int = 0
    """Repetitions of the captured pass with weights that are changed by one rounding error."""
    sequences: str = ""
    """File of the sequences; empty for the trainer's own micro batches."""
    prompt_tokens: int = 0
    """Number of tokens per sequence that are the prompt, and are not scored."""
    serving: str = ""
    """Folder of the serving engine's results."""
    relative_tolerance: float = 0.0
    """Relative error up to which rounding explains a difference of the tokens' log probabilities."""

    def write(self, path: Path) -> None:
        """Write the request as JSON."""
        with atomic_write(path) as file:
            file.write(msgspec.json.encode(self))


def read_request(path: Path) -> ScoreRequest:
    """Read a request that `ScoreRequest.write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=ScoreRequest)
