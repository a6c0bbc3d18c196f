"""Compute how Megatron divides a data set by `--split`, and how many samples and epochs a run draws.

`--split` has up to three weights, such as `949,50,1`, for the training, validation and test part. Megatron divides
the sequences of the data set, not its documents. A sample is `seq_length` consecutive tokens of a part, plus one more
token that is only predicted. An epoch is one pass over all tokens of the part.
"""

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
    """Part of a data set; the value is its position in Megatron's `--split`."""

    TRAINING = 0
    VALIDATION = 1
    TEST = 2


PART_NAMES = ("training", "validation", "test")
"""Names of the parts in sentences, by `Split`."""
_SHORT_PART_NAMES = ("train", "valid", "test")
"""Names of the parts in tables, by `Split`."""


@dataclass(frozen=True)
class Draw:
    """Size of one part of a data set, and the samples that Megatron draws from it (`core/datasets/gpt_dataset.py`)."""

    split: str
    """Name of the part: `train`, `valid` or `test`."""
    sequences: int
    tokens: int
    samples_an_epoch: int
    """Whole samples per epoch."""
    samples: int
    """Requested samples; for training these are iterations times the global batch size."""
    epochs: int
    """Epochs that Megatron needs for the requested samples; 0 if there are no samples or no tokens."""


def split_bounds(split: str, count: int) -> list[int]:
    """Return the index at which each of the three parts begins, and at which the last part ends.

    The indices are rounded as in Megatron's `BlendedMegatronDatasetBuilder`.

    Args:
        split: Weights of the parts, such as `949,50,1`.
        count: Number of sequences or documents to divide.

    Raises:
        DatasetError: `split` has no weights, too many weights or only zeros.
    """
    return [round(end * count) for end in split_ends(split)]


def split_ends(split: str) -> list[float]:
    """Return the bounds of the parts as fractions: 0.0, then the end of each of the three parts.

    A missing weight is 0.

    Raises:
        DatasetError: `split` has no weights, too many weights or only zeros.
    """
    weights = [float(number) for number in re.findall(r"[.0-9]+", split)]
    if not weights or len(weights) > len(Split) or sum(weights) <= 0:
        raise DatasetError(f"--split {split} is not of the form 949,50,1.")
    weights += [0.0] * (len(Split) - len(weights))
    total = sum(weights)
    return [*accumulate((weight / total for weight in weights), initial=0.0)]


@dataclass(frozen=True)
class DatasetPart:
    """Training, validation or test part of a data set."""

    name: str
    """Name in sentences, one of PART_NAMES."""
    weight: float
    """Requested fraction of the sequences; Megatron builds no part of weight 0."""
    sequences: int
    tokens: int

    def is_unusable(self, seq_length: int, evaluates: bool) -> bool:
        """Return True if Megatron fails on this part before the first iteration.

        Megatron repeats a part until it has all requested samples, and never ends if the part has no tokens. Without
        evaluation (`--eval-iters 0`), Megatron requests 0 samples of the validation and test parts. It still builds
        one epoch of them, and stops if that epoch has no complete sample.
        """
        if self.weight == 0:
            return False
        is_repeated = evaluates or self.name == PART_NAMES[Split.TRAINING]
        # A sample has one token more than the sequence: the last label.
        needed_tokens = 1 if is_repeated else seq_length + 1
        return self.tokens < needed_tokens


def divide_into_parts(dataset: Dataset, split: str) -> tuple[DatasetPart, ...]:
    """Return the training, the validation and the test part of a data set, in this order.

    Raises:
        DatasetError: `split` has no weights, too many weights or only zeros.
    """
    bounds = split_bounds(split, dataset.sequences)
    # A part reaches from its own bound to the next one.
    tokens_by_part = np.diff(dataset.tokens_before(np.array(bounds))).tolist()
    sequences_by_part = [end - begin for begin, end in pairwise(bounds)]
    weights = [end - begin for begin, end in pairwise(split_ends(split))]
    parts = []
    for part in Split:
        parts.append(
            DatasetPart(
                name=PART_NAMES[part],
                weight=weights[part],
                sequences=sequences_by_part[part],
                tokens=tokens_by_part[part],
            )
        )
    return tuple(parts)


def unusable_parts(
    dataset: Dataset, split: str, seq_length: int, evaluates: bool = True
) -> list[DatasetPart]:
    """Return the parts of the data set on which Megatron fails. An empty list means that `split` works.

    `evaluates` is False for a run with `--eval-iters 0`.
    """
    return [
        part
        for part in divide_into_parts(dataset, split)
        if part.is_unusable(seq_length, evaluates)
    ]


def usable_split(dataset: Dataset, seq_length: int, evaluates: bool = True) -> str | None:
    """Return a `--split` near to 949,50,1 that Megatron can use for a small data set, or None.

    None means that the data set is too small for any split. The weights are numbers of sequences. A data set of two
    sequences gets no test part. A data set of one sequence gets only a training part, and so does a run without
    evaluation (`evaluates` is False).
    """
    count = dataset.sequences
    validation = max(1, count * 50 // 1000)
    test = max(1, count // 1000)
    if not evaluates or count < 2:
        split = "1,0,0"
    elif count == 2:
        split = "1,1,0"
    else:
        split = f"{count - validation - test},{validation},{test}"
    return None if unusable_parts(dataset, split, seq_length, evaluates) else split


def usable_split_flags(dataset: Dataset, seq_length: int, evaluates: bool) -> tuple[str, ...]:
    """Return the flags of a `--split` that works for a small data set.

    The result is empty if no split works. If the split has no validation part, `--eval-iters 0` is added.
    """
    split = usable_split(dataset, seq_length, evaluates)
    if split is None:
        return ()
    has_validation = divide_into_parts(dataset, split)[Split.VALIDATION].weight > 0
    return (SPLIT_FLAG, split) if has_validation else (SPLIT_FLAG, split, EVAL_ITERATIONS_FLAG, "0")


def sizes_sentence(parts: Sequence[DatasetPart]) -> str:
    """Return the sizes of at least two parts as the end of a sentence, without a full stop.

    An example is 'training 9 documents (80 tokens), validation 1 document (7 tokens) and test …'.
    """
    sizes = [
        f"{part.name} {plural(part.sequences, 'document')} ({plural(part.tokens, 'token')})"
        for part in parts
    ]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]}"


def split_documents(split: str, documents: int, part: Split = Split.TRAINING) -> NDArray[np.int32]:
    """Return the indices of the documents that belong to one part, in ascending order."""
    bounds = split_bounds(split, documents)
    return np.arange(bounds[part], bounds[part + 1], dtype=np.int32)


def count_epochs(samples: int, tokens: int, seq_length: int) -> int:
    """Return the epochs over `tokens` tokens that Megatron needs for `samples` samples, at least one.

    The samples need one token more than they hold, because the last token is only predicted.
    """
    return -(-(samples * seq_length + 1) // tokens)


def count_samples(epochs: int, tokens: int, seq_length: int) -> int:
    """Return the number of whole samples in `epochs` epochs over `tokens` tokens."""
    return max(0, epochs * tokens - 1) // seq_length


def count_draws(
    dataset: Dataset, split: str, seq_length: int, samples: int, *evaluation_samples: int
) -> tuple[Draw, ...]:
    """Return the size of the training, validation and test part, and the samples drawn from each part.

    Args:
        dataset: The data set that is divided.
        split: Weights of the parts, such as `949,50,1`.
        seq_length: Tokens per sample.
        samples: Requested training samples: iterations times the global batch size.
        evaluation_samples: Requested validation samples, and then requested test samples. A missing number is 0.

    Raises:
        DatasetError: `split` has no weights, too many weights or only zeros.
    """
    requested_samples = (samples, *evaluation_samples, 0, 0)
    parts = divide_into_parts(dataset, split)
    draws = []
    for name, part, requested in zip(_SHORT_PART_NAMES, parts, requested_samples, strict=False):
        epochs = 0
        if requested and part.tokens:
            epochs = count_epochs(requested, part.tokens, seq_length)
        draw = Draw(
            split=name,
            sequences=part.sequences,
            tokens=part.tokens,
            samples_an_epoch=count_samples(1, part.tokens, seq_length),
            samples=requested,
            epochs=epochs,
        )
        draws.append(draw)
    return tuple(draws)
