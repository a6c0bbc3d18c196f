"""Compute the interval of a run's median from its own samples, which may be autocorrelated."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
NORMAL = 1.959964
MIN_FOR_BOOTSTRAP = 20

Floats = NDArray[np.float64]


def median_interval(values: Floats) -> tuple[float, float]:
    """Return the 95% confidence interval of a run's median, in the unit of `values`.

    The interval is the limit of a circular block bootstrap with many draws, computed without drawing. A
    resample's median is at most m if half of its values are at most m. The number of such values is a sum over
    independently drawn blocks, so it is normally distributed. Fewer than 20 samples give the interval of
    `order_statistics_interval`.
    """
    count = len(values)
    if count < MIN_FOR_BOOTSTRAP:
        return order_statistics_interval(values)
    # Printed times repeat: half a million samples have hundreds of values, and each test of a value reads
    # all samples, so only distinct values are tested.
    length, distinct = block_length(values), np.unique(values)

    def certainty(middle: float) -> float:
        """Return how many standard errors separate the values up to `middle` from half of a resample.

        It is positive if more than half of the values are at most `middle`.
        """
        below = values <= middle
        sums = np.concatenate([[0], np.cumsum(np.concatenate([below, below[: length - 1]]))])
        error = math.sqrt(count / length * float(np.var(sums[length:] - sums[:-length])))
        excess = float(sums[count]) - count / 2
        if error:
            return excess / error
        return math.copysign(math.inf, excess) if excess else 0.0

    low, high = (bisect_left(distinct, end, key=certainty) for end in (-NORMAL, NORMAL))
    return float(distinct[low]), float(distinct[min(high, len(distinct) - 1)])


def order_statistics_interval(values: Floats) -> tuple[float, float]:
    """Return an interval of the median that assumes no distribution.

    It is the narrowest symmetric pair of order statistics that holds the median with at least 95%.
    """
    count = len(values)
    ordered = np.sort(values)
    tail, rank = 0.5**count, 0
    # P(median below the k-th smallest) is the binomial tail up to k - 1.
    while 2 * (following := tail + math.comb(count, rank + 1) * 0.5**count) <= 1 - CONFIDENCE:
        tail, rank = following, rank + 1
    return float(ordered[rank]), float(ordered[count - 1 - rank])


def block_length(values: Floats) -> int:
    """Return the block length in samples for the circular bootstrap, by Politis & White's rule."""
    count = len(values)
    centred = values - values.mean()
    variance = float(centred @ centred) / count
    if variance == 0:
        return 1
    longest = min(count - 1, math.ceil(math.sqrt(count)) + 5)
    # A Fourier transform, because a sum per lag of half a million samples takes a second and a half.
    transformed = np.fft.rfft(centred, 1 << (count + longest).bit_length())
    products = np.fft.irfft(transformed.real**2 + transformed.imag**2)
    covariance = (products[: longest + 1] / count).tolist()
    band = 2 * math.sqrt(math.log10(count) / count)
    silent = [abs(value) / variance < band for value in covariance]
    last = next((k for k in range(1, longest) if all(silent[k : k + 5])), longest) - 1
    reach = min(2 * max(1, last), longest)
    weights = [1.0 if k / reach <= 0.5 else 2 * (1 - k / reach) for k in range(reach + 1)]
    slope = 2 * sum(w * k * c for k, (w, c) in enumerate(zip(weights, covariance, strict=False)))
    total = covariance[0] + 2 * sum(
        w * c for w, c in zip(weights[1:], covariance[1:], strict=False)
    )
    if total <= 0:
        return 1
    length = (2 * slope**2 / (4 / 3 * total**2)) ** (1 / 3) * count ** (1 / 3)
    return int(min(max(1, round(length)), max(1, count // 3)))
