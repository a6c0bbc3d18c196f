"""The one definition of "within noise": iteration time with an interval, and the verdict on two of them.

Two kinds of scatter are in an interval. Within a run: a block bootstrap's, whose block length follows
from the samples' autocorrelation (Politis & White 2004), above 10,000 samples its limit without draws;
order statistics' from 6 samples on; below there is none. Between runs: Student's t over the runs'
centres from three runs on; fewer cannot show it, so then a scatter is assumed that is known of other
repeats (`Scatter`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from parakit.logs import robust_spread
from parakit.reporting.analyse.resampling import (
    CONFIDENCE,
    MIN_FOR_BOOTSTRAP,
    NORMAL,
    median_interval,
)

MIN_FOR_INTERVAL = 6
REPEATS_FOR_TRUST = 3
"""Runs of a side from which on their own scatter stands for the noise between runs."""

_STUDENT = (
    *(12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.306, 2.26216, 2.22814),
    *(2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596),
)
"""Two-sided 95% quantiles of Student's t for 1 to 20 degrees of freedom."""


@dataclass(frozen=True)
class Scatter:
    """Relative standard deviation of iteration times between runs of one configuration."""

    assumed: float
    """Where fewer than three runs cannot show it: at least what was seen of others."""
    typical: float
    source: str


ON_GPUS = Scatter(
    0.02, 0.006, "57 published repeats on GPUs scatter by 0.04 to 1.7%, half of them by under 0.6%"
)
ON_CPU_RANKS = Scatter(
    0.055, 0.055, "the kit's own repeats on CPU ranks that shared two cores scatter by up to 5.5%"
)
"""pp2 of gpt2-tiny, 349 and 323 ms (`tests/golden/runs` and its repeat)."""


class IntervalMethod(StrEnum):
    """Where an interval comes from."""

    NONE = "no interval (fewer than 6 samples)"
    ORDER = "order statistics, and the assumed scatter between runs"
    BOOTSTRAP = "block bootstrap, and the assumed scatter between runs"
    RUNS = "Student's t over the runs"


@dataclass(frozen=True)
class Estimate:
    """A centre with its interval, over one run or several repeats."""

    median: float
    """Of one run; the mean of the runs' medians over several."""
    low: float | None
    high: float | None
    count: int
    runs: int
    spread: float
    """Robust standard deviation of one sample, relative to the median."""
    method: IntervalMethod
    standard_error: float | None = None
    """Relative standard error of the median as that of the configuration, not of its run alone."""
    degrees_of_freedom: int | None = None
    """Degrees of freedom of `error`; None where the scatter between runs is assumed."""
    scatter_between_runs: float | None = None
    """Relative standard deviation of the runs' medians; None of one run."""
    scatter: Scatter = ON_GPUS

    @property
    def repeats_disagree(self) -> bool:
        """Whether its runs scatter by more than twice what repeats are known to."""
        return (
            self.scatter_between_runs is not None
            and self.scatter_between_runs > 2 * self.scatter.assumed
        )


class TimeVerdict(StrEnum):
    """The verdict of a comparison of times on the second."""

    FASTER = "faster"
    SLOWER = "slower"
    NOISE = "within noise"
    UNKNOWN = "too few samples"

    @property
    def is_clear(self) -> bool:
        """Whether one is faster."""
        return self in (TimeVerdict.FASTER, TimeVerdict.SLOWER)

    def against(self, name: str) -> str:
        """`slower than tp2`, `within noise of tp2`."""
        if self is TimeVerdict.UNKNOWN:
            return f"of unknown speed against {name} ({self})"
        return f"{self} {'than' if self.is_clear else 'of'} {name}"


@dataclass(frozen=True)
class TimeComparison:
    """The second's time over the first's."""

    ratio: float
    low: float | None
    high: float | None
    verdict: TimeVerdict
    smallest: float | None = None
    """Relative difference below which nothing can be seen with these runs."""
    chance: float | None = None
    """Of a difference as large as this between equal times."""
    among: int = 0
    """The number of comparisons among which such a difference is none, though alone it would be one."""

    @property
    def span(self) -> str:
        """`95% 0.981 to 1.034`; empty where it is not known."""
        return f"95% {self.low:.3f} to {self.high:.3f}" if self.low and self.high else ""

    @property
    def resolution(self) -> str:
        """What these runs cannot show; empty where it is not known."""
        known = self.smallest
        return f"a difference below {known:.1%} cannot be seen with these runs" if known else ""


def estimate_time(runs: Sequence[Sequence[float]], scatter: Scatter = ON_GPUS) -> Estimate | None:
    """Median and interval of the samples of one run, or of several repeats.

    Runs with fewer than 6 samples count only where all are that short; they are then taken as one.
    None without samples.
    """
    arrays = [np.asarray(run, dtype=float) for run in runs if len(run)]
    if not arrays:
        return None
    pooled = np.concatenate(arrays)
    whole = [array for array in arrays if len(array) >= MIN_FOR_INTERVAL] or [pooled]
    medians = [float(np.median(array)) for array in whole]
    middle = sum(medians) / len(medians)
    spread = robust_spread(pooled) / middle if middle else 0.0
    counts = (len(pooled), len(arrays), spread)
    if min(map(len, whole)) < MIN_FOR_INTERVAL or middle <= 0:
        return Estimate(middle, None, None, *counts, IntervalMethod.NONE, scatter=scatter)
    method = (
        IntervalMethod.BOOTSTRAP if len(whole[0]) >= MIN_FOR_BOOTSTRAP else IntervalMethod.ORDER
    )
    method = IntervalMethod.RUNS if len(whole) >= REPEATS_FOR_TRUST else method
    return estimate_from_medians(
        medians, list(map(median_interval, whole)), scatter, counts, method
    )


def estimate_from_medians(
    medians: Sequence[float],
    within: Sequence[tuple[float, float]],
    scatter: Scatter,
    counts: tuple[int, int, float],
    method: IntervalMethod,
) -> Estimate:
    """The same of runs of which each has a median with an interval by its own samples.

    Args:
        medians: One a run.
        within: Their intervals.
        scatter: Assumed where there are too few runs to show it.
        counts: Samples, runs, and the spread of one sample.
        method: Where the intervals come from.
    """
    count, middle = len(medians), sum(medians) / len(medians)
    between = float(np.std(medians, ddof=1)) / middle if count > 1 else None
    own = math.sqrt(sum(((b - a) / 2 / NORMAL / middle) ** 2 for a, b in within) / count)
    freedom, assumed = None, max(scatter.assumed, between or 0.0)
    if between is not None and count >= REPEATS_FOR_TRUST:
        error, freedom = max(between, own) / math.sqrt(count), count - 1
        half = student_quantile(freedom) * error * middle
        low, high = middle - half, middle + half
    elif count > 1:
        error = math.hypot(assumed, own) / math.sqrt(count)
        low, high = middle * (1 - NORMAL * error), middle * (1 + NORMAL * error)
    else:
        # One run's interval leans to the side on which its own samples do.
        error, add = math.hypot(assumed, own), NORMAL * assumed * middle
        low = middle - math.hypot(middle - within[0][0], add)
        high = middle + math.hypot(within[0][1] - middle, add)
    # More digits than samples have would only differ between builds of numpy.
    low, high = min(middle, float(f"{max(0.0, low):.7g}")), max(middle, float(f"{high:.7g}"))
    return Estimate(middle, low, high, *counts, method, error, freedom, between, scatter)


def compare_times(reference: Estimate, other: Estimate, weight: float = 1.0) -> TimeComparison:
    """Compare times; `weight` scales the other's (tokens of the reference over its own).

    A difference is called if the ratio's 95% interval, which holds the scatter between runs, leaves
    out 1.
    """
    ratio = weight * other.median / reference.median
    if reference.standard_error is None or other.standard_error is None:
        return TimeComparison(ratio, None, None, TimeVerdict.UNKNOWN)
    (below, above), freedom = _distances(reference, other)
    low, high = ratio * math.exp(-below), ratio * math.exp(above)
    verdict = TimeVerdict.SLOWER if ratio > 1 else TimeVerdict.FASTER
    verdict = TimeVerdict.NOISE if low <= 1 <= high else verdict
    smallest = math.expm1(max(below, above))
    half = below if ratio > 1 else above
    # Of so many standard errors; Student's t as a normal deviate by Wallace (1959).
    errors = abs(math.log(ratio)) / half * student_quantile(freedom) if half and ratio else 0.0
    if math.isfinite(freedom):
        shrunk = math.sqrt(freedom * math.log1p(errors**2 / freedom))
        errors = (8 * freedom + 1) / (8 * freedom + 3) * shrunk
    return TimeComparison(ratio, low, high, verdict, smallest, math.erfc(errors / math.sqrt(2)))


def adjust_verdicts(found: Sequence[TimeComparison]) -> list[TimeComparison]:
    """Verdicts that are right together (Holm 1979): among many pairs one always looks different."""
    tested = [place for place, each in enumerate(found) if each.chance is not None]
    tested.sort(key=lambda place: found[place].chance or 0.0)
    # Of a single pair the interval decides.
    result, holds = list(found), True
    tested = tested if len(tested) > 1 else []
    for rank, place in enumerate(tested):
        holds = holds and (found[place].chance or 0.0) <= (1 - CONFIDENCE) / (len(tested) - rank)
        if not holds and found[place].verdict.is_clear:
            result[place] = replace(found[place], verdict=TimeVerdict.NOISE, among=len(tested))
    return result


def smallest_visible_difference(runs: int, scatter: float) -> float:
    """The relative difference that as many runs a side just see, where runs scatter by that much."""
    factor = student_quantile(2 * runs - 2) if runs >= REPEATS_FOR_TRUST else NORMAL
    return math.expm1(factor * scatter * math.sqrt(2 / runs))


def student_quantile(freedom: float) -> float:
    """Two-sided 95% quantile of Student's t; between whole numbers it is all but linear in 1/freedom."""
    if freedom <= len(_STUDENT):
        whole = 1 / np.arange(len(_STUDENT), 0, -1)
        return float(np.interp(1 / max(freedom, 1.0), whole, _STUDENT[::-1]))
    return NORMAL + 2.4 / freedom + 3 / freedom**2


def _distances(reference: Estimate, other: Estimate) -> tuple[tuple[float, float], float]:
    """From the ratio to its interval's ends, in logarithms, and the degrees of freedom behind them."""
    if not reference.degrees_of_freedom or not other.degrees_of_freedom:
        ends = [
            [
                abs(math.log(max(end or 0.0, 1e-9 * each.median) / each.median))
                for end in (each.low, each.high)
            ]
            for each in (reference, other)
        ]
        # The distances of both intervals' ends add up as squares (Zou & Donner 2008), each on its side.
        (low, high), (other_low, other_high) = ends
        return (math.hypot(other_low, high), math.hypot(other_high, low)), math.inf
    # Welch's t, because one strategy may scatter by ten times as much as another. Of three runs against
    # five its degrees of freedom are too many by chance, so they are averaged with the wider side's own.
    # Repeats that are equal to the last digit still differ by rounding.
    (narrow, one), (wide, two) = sorted(
        (max(each.standard_error or 0.0, 1e-9) ** 2, each.degrees_of_freedom or 0)
        for each in (reference, other)
    )
    welch = (narrow + wide) ** 2 / (narrow**2 / one + wide**2 / two)
    freedom = 2 / (1 / welch + 1 / two)
    half = student_quantile(freedom) * math.sqrt(narrow + wide)
    return (half, half), freedom
