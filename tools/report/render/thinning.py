"""Fewer points of a long run that show the same: curves keep their extremes, samples their mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0.6180339887498949


def extremes(values: Sequence[float] | NDArray[np.float64], limit: int) -> list[int]:
    """Places of at most `limit` values, both ends and the least and the largest of each stretch.

    A stride would show every second state of a run that alternates, and lose a spike.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    length = math.ceil(count / max(1, (limit - 2) // 2))
    found = np.full(math.ceil(count / length) * length, np.nan)
    found[:count] = values
    stretches = found.reshape(-1, length)
    known = np.isfinite(stretches).any(axis=1)
    starts, stretches = np.flatnonzero(known) * length, stretches[known]
    ends = (starts + np.nanargmin(stretches, axis=1), starts + np.nanargmax(stretches, axis=1))
    return sorted({0, count - 1, *(int(place) for place in np.concatenate(ends))})


def evenly(count: int, limit: int) -> list[int]:
    """Places of at most `limit` of `count` samples, spread evenly and without a period of their own."""
    if count <= limit:
        return list(range(count))
    return sorted({math.floor((k * _GOLDEN) % 1 * count) for k in range(1, limit + 1)})
