"""Training, validation and test as Megatron makes them: shares of the documents, before any cutting."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Part(IntEnum):
    """A data set's parts, in the order of a split such as `949,50,1`."""

    TRAINING = 0
    VALIDATION = 1
    TEST = 2


def split_documents(split: str, documents: int, part: Part = Part.TRAINING) -> NDArray[np.int32]:
    """The documents of a part; its bounds are rounded as `BlendedMegatronDatasetBuilder` does."""
    shares = [float(share) for share in split.split(",")]
    begin, end = (sum(shares[:place]) / sum(shares) for place in (part, part + 1))
    return np.arange(round(begin * documents), round(end * documents), dtype=np.int32)
