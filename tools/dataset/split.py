"""How Megatron divides a data set by `--split`, and what a run draws of each part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from tools.dataset.indexed import Dataset, DatasetError


class Split(IntEnum):
    """The parts, in the order of Megatron's `--split`, such as `949,50,1`."""

    TRAINING = 0
    VALIDATION = 1
    TEST = 2


_PRINTED = ("train", "valid", "test")


@dataclass(frozen=True)
class Draw:
    """What Megatron's GPT data set draws from one part (`megatron/core/datasets/gpt_dataset.py`)."""

    split: str
    sequences: int
    tokens: int
    samples_an_epoch: int
    samples: int
    """Asked for: for training iterations times global batch."""
    epochs: int
    """Passes over the part that it takes Megatron to have that many."""


def split_bounds(split: str, count: int) -> list[int]:
    """Where each part of `count` documents (or sequences) begins, and where the last one ends.

    As `BlendedMegatronDatasetBuilder` rounds them.
    """
    return [round(end * count) for end in split_ends(split)]


def split_ends(split: str) -> list[float]:
    """As `split_bounds`, of the whole as 1; weights that are left out are 0."""
    weights = [float(number) for number in re.findall(r"[.0-9]+", split)]
    if not weights or len(weights) > len(Split) or sum(weights) <= 0:
        raise DatasetError(f"--split {split} is not of the form 949,50,1.")
    weights += [0.0] * (len(Split) - len(weights))
    total = sum(weights)
    return [*accumulate((weight / total for weight in weights), initial=0.0)]


def empty_splits(split: str, documents: int) -> Iterator[tuple[str, float]]:
    """Parts with a share above 0 that hold no document, with that share."""
    shares, bounds = pairwise(split_ends(split)), pairwise(split_bounds(split, documents))
    names = ("train", "validation", "test")
    for name, (begin, end), (first, last) in zip(names, shares, bounds, strict=True):
        if end > begin and first == last:
            yield name, end - begin


def split_documents(split: str, documents: int, part: Split = Split.TRAINING) -> NDArray[np.int32]:
    """The numbers of a part's documents."""
    bounds = split_bounds(split, documents)
    return np.arange(bounds[part], bounds[part + 1], dtype=np.int32)


def epochs_for(samples: int, tokens: int, seq_length: int) -> int:
    """Passes over so many tokens that Megatron needs for the samples.

    One token more than the samples hold is needed: the last one is only predicted.
    """
    return -(-(samples * seq_length + 1) // tokens)


def samples_of(epochs: int, tokens: int, seq_length: int) -> int:
    """Samples in so many whole passes over so many tokens."""
    return max(0, epochs * tokens - 1) // seq_length


def draws(
    dataset: Dataset, split: str, seq_length: int, samples: int, *others: int
) -> tuple[Draw, ...]:
    """What each part holds, and what a run draws from it; `--split` cuts by sequences.

    So many samples are asked for training (iterations times global batch), and so many `others` for
    validation and test, 0 if not given.
    """
    bounds = split_bounds(split, dataset.sequences)
    sizes = np.diff(dataset.tokens_before(np.array(bounds))).tolist()
    asked: Sequence[int] = (samples, *others, 0, 0)
    return tuple(
        Draw(
            split=_PRINTED[part],
            sequences=bounds[part + 1] - bounds[part],
            tokens=sizes[part],
            samples_an_epoch=samples_of(1, sizes[part], seq_length),
            samples=asked[part],
            epochs=epochs_for(asked[part], sizes[part], seq_length)
            if asked[part] and sizes[part]
            else 0,
        )
        for part in Split
    )
