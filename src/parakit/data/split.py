"""How Megatron divides a data set by `--split`, and what a run draws of each part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from parakit.data.indexed import Dataset, DatasetError
from parakit.formatting.units import plural

SPLIT_FLAG, EVAL_ITERATIONS_FLAG = "--split", "--eval-iters"


class Split(IntEnum):
    """The parts, in the order of Megatron's `--split`, such as `949,50,1`."""

    TRAINING = 0
    VALIDATION = 1
    TEST = 2


PART_NAMES = ("training", "validation", "test")
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


@dataclass(frozen=True)
class Part:
    """One part of a data set as `--split` divides it."""

    name: str
    weight: float
    """Fraction of the sequences that `--split` asks for; Megatron builds no part of weight 0."""
    sequences: int
    tokens: int

    def is_unusable(self, seq_length: int, evaluates: bool) -> bool:
        """Return True if Megatron fails on the part before the first iteration.

        Megatron repeats a part until it has all samples, which never ends if the part has no tokens. If
        nothing is evaluated (`--eval-iters 0`), Megatron asks the validation and test parts for 0
        samples, cuts each part once, and stops if not even one sample comes of it.
        """
        if self.weight == 0:
            return False
        is_repeated = evaluates or self.name == PART_NAMES[Split.TRAINING]
        return self.tokens < (1 if is_repeated else seq_length + 1)


def parts_of(dataset: Dataset, split: str) -> tuple[Part, ...]:
    """Return the training, validation and test part; Megatron divides sequences, not documents."""
    bounds = split_bounds(split, dataset.sequences)
    sizes = np.diff(dataset.tokens_before(np.array(bounds))).tolist()
    shares = [end - begin for begin, end in pairwise(split_ends(split))]
    return tuple(
        Part(PART_NAMES[part], shares[part], bounds[part + 1] - bounds[part], sizes[part])
        for part in Split
    )


def unusable_parts(
    dataset: Dataset, split: str, seq_length: int, evaluates: bool = True
) -> list[Part]:
    """Return the parts that Megatron cannot build or read; an empty list means that `split` works."""
    return [part for part in parts_of(dataset, split) if part.is_unusable(seq_length, evaluates)]


def usable_split(dataset: Dataset, seq_length: int, evaluates: bool = True) -> str | None:
    """Return a split of a small data set that Megatron can use, near to 949,50,1; None if none works.

    Its weights are numbers of sequences. A set of two sequences has no test part. A set of one sequence
    is for training alone, and so is a set that nothing evaluates on.
    """
    count = dataset.sequences
    validation, test = max(1, count * 50 // 1000), max(1, count // 1000)
    if not evaluates or count < 2:
        split = "1,0,0"
    elif count == 2:
        split = "1,1,0"
    else:
        split = f"{count - validation - test},{validation},{test}"
    return None if unusable_parts(dataset, split, seq_length, evaluates) else split


def usable_split_flags(dataset: Dataset, seq_length: int, evaluates: bool) -> tuple[str, ...]:
    """Return a `--split` that works for a small data set, with `--eval-iters 0` if that split has no
    validation part; nothing if no split works."""
    split = usable_split(dataset, seq_length, evaluates)
    if split is None:
        return ()
    has_validation = parts_of(dataset, split)[Split.VALIDATION].weight > 0
    return (SPLIT_FLAG, split) if has_validation else (SPLIT_FLAG, split, EVAL_ITERATIONS_FLAG, "0")


def sizes_sentence(parts: Sequence[Part]) -> str:
    """Return the size of each part as the end of a sentence."""
    *sizes, last = (
        f"{part.name} {plural(part.sequences, 'document')} ({plural(part.tokens, 'token')})"
        for part in parts
    )
    return f"{', '.join(sizes)} and {last}"


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
