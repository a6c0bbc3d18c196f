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
        is_below = values <= middle
        # The samples form a circle, so the last blocks end with samples from the beginning.
        circle = np.concatenate([is_below, is_below[: length - 1]])
        sums = np.concatenate([[0], np.cumsum(circle)])
        num_below_by_block = sums[length:] - sums[:-length]
        error = math.sqrt(count / length * float(np.var(num_below_by_block)))
        excess = float(sums[count]) - count / 2
        if error:
            return excess / error
        return math.copysign(math.inf, excess) if excess else 0.0

    low = bisect_left(distinct, -NORMAL, key=certainty)
    high = min(bisect_left(distinct, NORMAL, key=certainty), len(distinct) - 1)
    return float(distinct[low]), float(distinct[high])


def order_statistics_interval(values: Floats) -> tuple[float, float]:
    """Return an interval of the median that assumes no distribution.

    The ends are the k-th smallest and the k-th largest sample. k is the largest number with which the interval contains
    the median in at least 95% of all cases. If no k is enough, they are the smallest and the largest sample. It is used
    for fewer than MIN_FOR_BOOTSTRAP samples; more than 1,000 samples would overflow.
    """
    count = len(values)
    ordered = np.sort(values)
    rank = 0
    # The median is below the k-th smallest sample with the probability of the binomial tail up to k - 1.
    tail = 0.5**count
    while True:
        next_tail = tail + math.comb(count, rank + 1) * 0.5**count
        if 2 * next_tail > 1 - CONFIDENCE:
            break
        tail = next_tail
        rank += 1
    return float(ordered[rank]), float(ordered[count - 1 - rank])


def block_length(values: Floats) -> int:
    """Return the block length in samples for the circular bootstrap.

    The length follows from the autocovariance by the rule of Politis & White (2004). Samples that do not vary give
    1, and no length is above a third of the samples.
    """
    count = len(values)
    centred = values - values.mean()
    variance = float(centred @ centred) / count
    if variance == 0:
        return 1
    longest_lag = min(count - 1, math.ceil(math.sqrt(count)) + 5)
    covariance = _autocovariance(centred, longest_lag)
    last_correlated = _find_last_correlated_lag(covariance, variance, count)
    reach = min(2 * max(1, last_correlated), longest_lag)
    lags = range(reach + 1)
    # The weights are 1 up to half of the reach, and fall to 0 at its end.
    weights = [1.0 if lag / reach <= 0.5 else 2 * (1 - lag / reach) for lag in lags]
    slope = 2 * sum(weights[lag] * lag * covariance[lag] for lag in lags)
    total = covariance[0] + 2 * sum(weights[lag] * covariance[lag] for lag in lags[1:])
    if total <= 0:
        return 1
    length = (2 * slope**2 / (4 / 3 * total**2)) ** (1 / 3) * count ** (1 / 3)
    return int(min(max(1, round(length)), max(1, count // 3)))


def _autocovariance(centred: Floats, longest_lag: int) -> list[float]:
    """Return the autocovariance of samples with mean 0 by lag, from lag 0 to `longest_lag`."""
    count = len(centred)
    # A Fourier transform, because a sum per lag of half a million samples takes a second and a half.
    padded_length = 1 << (count + longest_lag).bit_length()
    transformed = np.fft.rfft(centred, padded_length)
    products = np.fft.irfft(transformed.real**2 + transformed.imag**2)
    covariance: list[float] = (products[: longest_lag + 1] / count).tolist()
    return covariance


def _find_last_correlated_lag(covariance: list[float], variance: float, count: int) -> int:
    """Return the lag after which five autocorrelations in a row are too small to differ from 0.

    Near the longest lag fewer than five autocorrelations are left. It is then enough that all of these, and at least
    two, are too small. Few samples would otherwise always count as correlated. If there is no such lag, the result
    is the last lag but one.

    Args:
        covariance: Autocovariance by lag, from lag 0 on.
        variance: Variance of the samples, above 0.
        count: Number of samples.
    """
    longest_lag = len(covariance) - 1
    insignificant = 2 * math.sqrt(math.log10(count) / count)
    is_silent = [abs(value) / variance < insignificant for value in covariance]
    for lag in range(1, longest_lag):
        if all(is_silent[lag : lag + 5]):
            return lag - 1
    return longest_lag - 1
