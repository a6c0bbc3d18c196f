"""Fewer points of a long run that show the same: curves keep their extremes, samples their mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

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
    stretches = max(1, (limit - 2) // 2)
    edges = np.linspace(0, count, stretches + 1).astype(int)
    found = np.asarray(values, dtype=float)
    kept = {0, count - 1}
    for start, stop in pairwise(edges):
        part = found[start:stop]
        if len(part) and np.isfinite(part).any():
            kept |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return sorted(map(int, kept))


def evenly(count: int, limit: int) -> list[int]:
    """Places of at most `limit` of `count` samples, spread evenly and without a period of their own."""
    if count <= limit:
        return list(range(count))
    return sorted({math.floor((k * _GOLDEN) % 1 * count) for k in range(1, limit + 1)})
