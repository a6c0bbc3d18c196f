"""Median iteration time with an interval, and the verdict on two of them.

From 20 samples on the interval is a block bootstrap's, whose block length follows from the
samples' own autocorrelation (Politis & White 2004); from 6 on it is the order statistics'; below
there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tools.report.read.window import robust_spread

CONFIDENCE = 0.95
MIN_FOR_BOOTSTRAP = 20
MIN_FOR_INTERVAL = 6
REPEATS_FOR_TRUST = 3
"""Runs of each side from which on their own scatter stands for the noise between runs."""

_SEED = 20250901
_MAX_DRAWS, _MIN_DRAWS, _CELLS = 2000, 200, 20_000_000

Floats = NDArray[np.float64]
Centre = Callable[[Floats], Floats]
"""What stands for samples, over the last axis."""


def median(values: Floats) -> Floats:
    """The usual centre."""
    middle: Floats = np.median(values, axis=-1)
    return middle


def fastest_half(values: Floats) -> Floats:
    """The mean of the lower half: what else a machine does only adds to times."""
    half = max(1, values.shape[-1] // 2)
    lower: Floats = np.sort(values, axis=-1)[..., :half].mean(axis=-1)
    return lower


class Method(StrEnum):
    """Where an interval comes from."""

    NONE = "no interval (fewer than 6 samples)"
    ORDER = "order statistics"
    BOOTSTRAP = "block bootstrap"


@dataclass(frozen=True)
class Estimate:
    """A median with its interval, over one run or several repeats."""

    median: float
    low: float | None
    high: float | None
    count: int
    runs: int
    spread: float
    """Robust standard deviation of one sample, relative to the median."""
    method: Method
    draws: tuple[float, ...] = ()
    """Medians of the bootstrap's resamples."""


class Verdict(StrEnum):
    """The verdict of a comparison of times on the second."""

    FASTER = "faster"
    SLOWER = "slower"
    NOISE = "within noise"
    UNKNOWN = "too few samples"


@dataclass(frozen=True)
class Comparison:
    """The second's time over the first's."""

    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict
    noise: float
    """Relative difference below which there is no verdict: the spread between iterations, where
    repeats do not show the spread between runs."""


def estimate(runs: Sequence[Sequence[float]], centre: Centre = median) -> Estimate | None:
    """Median, or another centre, and interval of the samples of one run, or of several repeats pooled.

    Several runs are resampled first as wholes, then in blocks, so that the scatter between runs
    counts. None without samples.
    """
    arrays = [np.asarray(run, dtype=float) for run in runs if len(run)]
    if not arrays:
        return None
    pooled = np.concatenate(arrays)
    middle = float(centre(pooled))
    low: float | None = None
    high: float | None = None
    draws: tuple[float, ...] = ()
    method = Method.NONE
    if len(pooled) >= MIN_FOR_BOOTSTRAP:
        method = Method.BOOTSTRAP
        medians = _bootstrap(arrays, centre)
        low, high = _quantiles(medians)
        draws = tuple(medians.tolist())
    elif len(pooled) >= MIN_FOR_INTERVAL:
        method = Method.ORDER
        low, high = order_interval(pooled)
    spread = robust_spread(pooled) / middle if middle else 0.0
    return Estimate(middle, low, high, len(pooled), len(arrays), spread, method, draws)


def compare(reference: Estimate, other: Estimate, weight: float = 1.0) -> Comparison:
    """Compare times; `weight` scales the other's (tokens of the reference over its own).

    A difference is called only if the ratio's interval leaves out 1 and, unless both sides have
    repeats enough, the difference exceeds the spread between iterations: one run each says nothing
    of the noise between runs, and the spread within them is the best stand-in there is.
    """
    ratio = weight * other.median / reference.median
    low, high = _ratio_interval(reference, other, weight)
    trusted = min(reference.runs, other.runs) >= REPEATS_FOR_TRUST
    noise = 0.0 if trusted else max(reference.spread, other.spread)
    return Comparison(ratio, low, high, _verdict(ratio, low, high, noise), noise)


def order_interval(values: Floats) -> tuple[float, float]:
    """Distribution-free interval of the median: the narrowest symmetric pair of order statistics
    that holds it with at least 95%.
    """
    count = len(values)
    ordered = np.sort(values)
    tail, rank = 0.5**count, 0
    # P(median below the k-th smallest) is the binomial tail up to k - 1.
    while 2 * (following := tail + math.comb(count, rank + 1) * 0.5**count) <= 1 - CONFIDENCE:
        tail, rank = following, rank + 1
    return float(ordered[rank]), float(ordered[count - 1 - rank])


def block_length(values: Floats) -> int:
    """Length of blocks for the circular bootstrap, by Politis & White's rule."""
    count = len(values)
    centred = values - values.mean()
    variance = float(centred @ centred) / count
    if variance == 0:
        return 1
    longest = min(count - 1, math.ceil(math.sqrt(count)) + 5)
    covariance = [float(centred[: count - k] @ centred[k:]) / count for k in range(longest + 1)]
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


def _bootstrap(arrays: list[Floats], centre: Centre) -> Floats:
    generator = np.random.default_rng(_SEED)
    size = sum(len(array) for array in arrays)
    draws = int(min(_MAX_DRAWS, max(_MIN_DRAWS, _CELLS // size)))
    if len(arrays) == 1:
        return _centres_of_blocks(arrays[0], draws, generator, centre)
    lengths = [block_length(array) if len(array) > 1 else 1 for array in arrays]
    result = np.empty(draws)
    for draw in range(draws):
        chosen = generator.integers(len(arrays), size=len(arrays))
        parts = [_resample(arrays[run], lengths[run], 1, generator)[0] for run in chosen]
        result[draw] = centre(np.concatenate(parts))
    return result


def _centres_of_blocks(
    values: Floats, draws: int, generator: np.random.Generator, centre: Centre
) -> Floats:
    length = block_length(values)
    batch = max(1, 4_000_000 // len(values))
    parts = [
        centre(_resample(values, length, min(batch, draws - done), generator))
        for done in range(0, draws, batch)
    ]
    return np.concatenate(parts)


def _resample(values: Floats, length: int, draws: int, generator: np.random.Generator) -> Floats:
    count = len(values)
    blocks = -(-count // length)
    starts = generator.integers(count, size=(draws, blocks, 1))
    places = ((starts + np.arange(length)) % count).reshape(draws, -1)[:, :count]
    resampled: Floats = values[places]
    return resampled


def _ratio_interval(
    reference: Estimate, other: Estimate, weight: float
) -> tuple[float | None, float | None]:
    if reference.draws and other.draws:
        size = min(len(reference.draws), len(other.draws))
        # One side is reversed: both use one seed, and equal samples must not cancel out.
        ratios = weight * np.array(other.draws[:size]) / np.array(reference.draws[:size][::-1])
        return _quantiles(ratios)
    if reference.low is None or reference.high is None:
        return None, None
    if other.low is None or other.high is None:
        return None, None
    return weight * other.low / reference.high, weight * other.high / reference.low


def _verdict(ratio: float, low: float | None, high: float | None, noise: float) -> Verdict:
    if low is None or high is None:
        return Verdict.UNKNOWN
    if low <= 1 <= high or abs(ratio - 1) <= noise:
        return Verdict.NOISE
    return Verdict.SLOWER if ratio > 1 else Verdict.FASTER


def _quantiles(values: Floats) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
