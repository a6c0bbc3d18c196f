"""Whether a model is validated on what it was trained on: windows of tokens in both parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.dataset.indexed import open_dataset
from tools.dataset.split import Split, split_bounds

_BASE = 0x9E3779B97F4A7C15
_MODULUS = 2**64


@dataclass(frozen=True)
class Shared:
    """How many of the validation windows are somewhere in the training part."""

    windows: int
    shared: int
    length: int
    """Tokens of a window: a sample and its last label."""


def shared_windows(prefix: Path, split: str, seq_length: int) -> Shared:
    """Compare every window of the validation documents, at any offset, with every one of training.

    Windows are compared by a 64-bit hash: different hashes prove that windows differ, so none shared
    is certain; a few shared may be one too many, once in 2^64 pairs.

    Raises:
        DatasetError: The data set is not there or not whole.
    """
    length = seq_length + 1
    training, validation = (
        _stream(prefix, split, part) for part in (Split.TRAINING, Split.VALIDATION)
    )
    ours = window_hashes(validation, length)
    shared = np.isin(ours, window_hashes(training, length))
    return Shared(len(ours), int(shared.sum()), length)


def window_hashes(tokens: NDArray[Any], length: int) -> NDArray[np.uint64]:
    """A polynomial hash, modulo 2^64, of each window of so many tokens."""
    if len(tokens) < length:
        return np.empty(0, dtype=np.uint64)
    powers = _powers(_BASE, len(tokens) + 1)
    sums = np.concatenate(([np.uint64(0)], np.cumsum((tokens.astype(np.uint64) + 1) * powers[:-1])))
    # Each window's sum is divided by the power it starts with, so that its place does not count.
    inverse = _powers(pow(_BASE, -1, _MODULUS), len(tokens) - length + 1)
    hashes: NDArray[np.uint64] = (sums[length:] - sums[:-length]) * inverse
    return hashes


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _stream(prefix: Path, split: str, part: Split) -> NDArray[Any]:
    dataset = open_dataset(prefix)
    bounds = np.array(split_bounds(split, dataset.sequences)[part : part + 2])
    begin, end = dataset.tokens_before(bounds)
    return dataset.stored[begin:end]


def commonest_share(prefix: Path, split: str) -> float:
    """Share of the validation tokens that are the commonest one: the accuracy of saying it always."""
    counts = np.bincount(_stream(prefix, split, Split.VALIDATION))
    return float(counts.max() / counts.sum())
