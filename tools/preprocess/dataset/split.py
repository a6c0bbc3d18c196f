"""Training, validation and test as Megatron makes them: shares of the documents, before any cutting."""

from __future__ import annotations

import re
from enum import IntEnum
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tools.preprocess.errors import PreprocessError


class Part(IntEnum):
    """A data set's parts, in the order of a split such as `949,50,1`."""

    TRAINING = 0
    VALIDATION = 1
    TEST = 2


def split_bounds(split: str, count: int) -> list[int]:
    """Where each part of `count` documents (or sequences) begins, and where the last one ends.

    As `BlendedMegatronDatasetBuilder` rounds them; weights that are left out are 0.

    Raises:
        PreprocessError: Not of that form.
    """
    weights = [float(number) for number in re.findall(r"[.0-9]+", split)]
    if not weights or len(weights) > len(Part) or sum(weights) <= 0:
        raise PreprocessError(f"--split {split} is not of the form 949,50,1.")
    weights += [0.0] * (len(Part) - len(weights))
    total = sum(weights)
    ends = accumulate((weight / total for weight in weights), initial=0.0)
    return [round(end * count) for end in ends]


def split_documents(split: str, documents: int, part: Part = Part.TRAINING) -> NDArray[np.int32]:
    """The numbers of a part's documents."""
    bounds = split_bounds(split, documents)
    return np.arange(bounds[part], bounds[part + 1], dtype=np.int32)
