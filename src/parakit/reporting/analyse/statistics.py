"""Estimate iteration times with intervals and compare two of them: the only definition of "within noise".

An interval holds two kinds of scatter. Within a run: a block bootstrap with a block length from the samples'
autocorrelation (Politis & White 2004), order statistics for 6 to 19 samples, and no interval for fewer.
Between runs: Student's t over the runs' medians from three runs on; for fewer runs, a scatter that is known of
other repeats is assumed (`Scatter`), with the quantile of its degrees of freedom. A single run is
assumed to scatter at least as much as the runs with which it is compared.

scipy.stats is not used. It has Student's t and the binomial ranks, which are 30 lines here, and neither the block
bootstrap nor its block length nor changes within a run. Its import takes 1.2 s of processor time (1.18.1; numpy's
0.14 s) and 139 MB, and a report without the charts' packages would need the 30 lines all the same. For whole degrees
of freedom the quantiles here differ from scipy's by less than 0.07%, and p-values by less than 0.004.
"""

from __future__ import annotations

import functools
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
"""Number of runs from which on their own scatter is used instead of an assumed one."""

_STUDENT = (
    *(12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.306, 2.26216, 2.22814),
    *(2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596),
)
"""Two-sided 95% quantiles of Student's t for 1 to 20 degrees of freedom."""


@dataclass(frozen=True)
class Scatter:
    """Relative standard deviation of iteration times between runs of one configuration."""

    assumed: float
    """Scatter that is assumed for one or two runs, which cannot show their own."""
    typical: float
    """Scatter of usual repeats."""
    source: str
    """Measurements on which both rest, as text for a sentence."""
    degrees_of_freedom: float
    """Degrees of freedom of the assumed scatter; infinite if it is the largest scatter that repeats have shown."""


ON_GPUS = Scatter(
    0.02,
    0.006,
    "57 published repeats on GPUs scatter by 0.04 to 1.7%, half of them by under 0.6%",
    degrees_of_freedom=3,
)
"""Scatter of repeats on GPUs. Single runs that scatter by 3% get 3.4% false verdicts against one another.

With four degrees of freedom they would get 6.6%."""
ON_CPU_RANKS = Scatter(
    0.055,
    0.055,
    "the kit's own repeats on CPU ranks that shared two cores scatter by up to 5.5%",
    degrees_of_freedom=math.inf,
)
"""Scatter of pp2 of gpt2-tiny: 349 and 323 ms (`tests/golden/runs` and its repeat)."""


class IntervalMethod(StrEnum):
    """Method by which an interval was computed."""

    NONE = "no interval (fewer than 6 samples)"
    ORDER = "order statistics, and the assumed scatter between runs"
    BOOTSTRAP = "block bootstrap, and the assumed scatter between runs"
    RUNS = "Student's t over the runs"


@dataclass(frozen=True)
class Estimate:
    """Iteration time of one run or of several repeats, with its 95% interval."""

    median: float
    """Median of one run; of several runs the mean of their medians."""
    low: float | None
    high: float | None
    """Ends of the 95% interval; None if there are too few samples."""
    count: int
    """Number of samples over all runs."""
    runs: int
    spread: float
    """Robust standard deviation of one sample, relative to the median."""
    method: IntervalMethod
    standard_error: float | None = None
    """Relative standard error of `median`, scatter between runs included; None without an interval."""
    degrees_of_freedom: int | None = None
    """Degrees of freedom of `standard_error`; None if the scatter between runs is assumed."""
    scatter_between_runs: float | None = None
    """Relative standard deviation of the runs' medians; None for a single run."""
    scatter: Scatter = ON_GPUS

    @property
    def is_single_run(self) -> bool:
        """True if one run, or several that are each too short, is all that the time rests on."""
        return self.scatter_between_runs is None

    @property
    def repeats_disagree(self) -> bool:
        """True if the runs scatter by more than twice the assumed scatter of repeats."""
        return (
            self.scatter_between_runs is not None
            and self.scatter_between_runs > 2 * self.scatter.assumed
        )


class TimeVerdict(StrEnum):
    """Verdict on whether a time is faster or slower than its reference."""

    FASTER = "faster"
    SLOWER = "slower"
    NOISE = "within noise"
    UNKNOWN = "too few samples"

    @property
    def is_clear(self) -> bool:
        """True if one of the two times is shown to be shorter."""
        return self in (TimeVerdict.FASTER, TimeVerdict.SLOWER)

    def against(self, name: str) -> str:
        """Return the verdict with the reference's name: `slower than tp2`, `within noise of tp2`."""
        if self is TimeVerdict.UNKNOWN:
            return f"of unknown speed against {name} ({self})"
        return f"{self} {'than' if self.is_clear else 'of'} {name}"


@dataclass(frozen=True)
class TimeComparison:
    """Time of a row divided by the time of its reference, with the verdict."""

    ratio: float
    low: float | None
    high: float | None
    """Ends of the ratio's 95% interval; None if a time has no interval."""
    verdict: TimeVerdict
    smallest: float | None = None
    """Relative difference below which these runs show nothing; None without an interval."""
    chance: float | None = None
    """p-value: probability of a difference as large as this if the times are equal."""
    among: int = 0
    """Number of comparisons that made the verdict `within noise` by Holm's rule; 0 if none did."""
    is_undecidable: bool = False
    """True if a single run differs from several by more than these scatter, and by less than one run can show.

    It is also True if the single run is so noisy that its iterations show less than repeats usually differ."""

    @property
    def outcome(self) -> str:
        """Verdict as text; `undecidable with a single run` if a repeat of that run could decide."""
        return "undecidable with a single run" if self.is_undecidable else self.verdict.value

    @property
    def span(self) -> str:
        """Text of the interval, `95% 0.981 to 1.034`; empty if it is unknown."""
        return f"95% {self.low:.3f} to {self.high:.3f}" if self.low and self.high else ""

    @property
    def resolution(self) -> str:
        """Text on the smallest visible difference; empty if it is unknown."""
        known = self.smallest
        return f"a difference below {known:.1%} cannot be seen with these runs" if known else ""


def describe_ratio(ratio: float) -> str:
    """Return a ratio of times as people say it: `35% less`, `4.2% more`, or `2.3 times` from 2 on."""
    if ratio >= 2:
        return f"{ratio:.3g} times"
    return f"{_percentage(abs(ratio - 1))} {'less' if ratio < 1 else 'more'}"


def describe_speed(ratio: float) -> str:
    """Return a ratio of times below 1 as `1.56 times as fast`; empty for a ratio of 1 or more."""
    return f"{1 / ratio:.3g} times as fast" if 0 < ratio < 1 else ""


def describe_ratio_interval(low: float, high: float) -> str:
    """Return the ends of a ratio's interval: `23% to 45% less`, `1.9% less to 33% more`."""
    if high < 1:
        return f"{_percentage(1 - high)} to {_percentage(1 - low)} less"
    if low > 1 and high < 2:
        return f"{_percentage(low - 1)} to {_percentage(high - 1)} more"
    return f"{describe_ratio(low)} to {describe_ratio(high)}"


def _percentage(fraction: float) -> str:
    """Return a percentage without decimals from 10% on, with one decimal below."""
    return f"{fraction:.0%}" if fraction >= 0.0995 else f"{fraction:.1%}"


def estimate_time(runs: Sequence[Sequence[float]], scatter: Scatter = ON_GPUS) -> Estimate | None:
    """Return the median time over one run or several repeats, with its interval; None without samples.

    Runs with fewer than 6 samples are left out. If all runs are that short, their samples are pooled like those
    of one run.

    Args:
        runs: Samples of each run.
        scatter: Scatter between runs, which is assumed for one or two runs.
    """
    samples_by_run = [np.asarray(run, dtype=float) for run in runs if len(run)]
    if not samples_by_run:
        return None
    pooled = np.concatenate(samples_by_run)
    long_runs = [samples for samples in samples_by_run if len(samples) >= MIN_FOR_INTERVAL]
    if not long_runs:
        long_runs = [pooled]
    medians = [float(np.median(samples)) for samples in long_runs]
    mean_of_medians = sum(medians) / len(medians)
    spread = robust_spread(pooled) / mean_of_medians if mean_of_medians else 0.0
    counts = (len(pooled), len(samples_by_run), spread)
    if len(long_runs[0]) < MIN_FOR_INTERVAL or mean_of_medians <= 0:
        return Estimate(mean_of_medians, None, None, *counts, IntervalMethod.NONE, scatter=scatter)
    method = IntervalMethod.ORDER
    if len(long_runs[0]) >= MIN_FOR_BOOTSTRAP:
        method = IntervalMethod.BOOTSTRAP
    if len(long_runs) >= REPEATS_FOR_TRUST:
        method = IntervalMethod.RUNS
    intervals = [median_interval(samples) for samples in long_runs]
    return estimate_from_medians(medians, intervals, scatter, counts=counts, method=method)


def estimate_from_medians(
    medians: Sequence[float],
    within: Sequence[tuple[float, float]],
    scatter: Scatter,
    counts: tuple[int, int, float],
    method: IntervalMethod,
) -> Estimate:
    """Return the mean of the medians of several runs, with its interval.

    Args:
        medians: Median of each run.
        within: Interval of each median by the run's own samples.
        scatter: Scatter between runs, which is assumed if there are too few runs.
        counts: Number of samples, number of runs, and relative spread of one sample.
        method: Method of the intervals.
    """
    num_runs, middle = len(medians), sum(medians) / len(medians)
    between = float(np.std(medians, ddof=1)) / middle if num_runs > 1 else None
    squares = [((high - low) / 2 / NORMAL / middle) ** 2 for low, high in within]
    within_error = math.sqrt(sum(squares) / num_runs)
    assumed = max(scatter.assumed, between or 0.0)
    quantile = student_quantile(scatter.degrees_of_freedom)
    degrees_of_freedom = None
    if between is not None and num_runs >= REPEATS_FOR_TRUST:
        # The runs are enough to show their own scatter.
        error = max(between, within_error) / math.sqrt(num_runs)
        degrees_of_freedom = num_runs - 1
        half_width = student_quantile(degrees_of_freedom) * error * middle
        low, high = middle - half_width, middle + half_width
    elif num_runs > 1:
        error = math.hypot(assumed, within_error) / math.sqrt(num_runs)
        low, high = middle * (1 - quantile * error), middle * (1 + quantile * error)
    else:
        # The interval of a single run is as asymmetric as the interval of its own samples.
        error = math.hypot(assumed, within_error)
        half_width_between = quantile * assumed * middle
        own_low, own_high = within[0]
        low = middle - math.hypot(middle - own_low, half_width_between)
        high = middle + math.hypot(own_high - middle, half_width_between)
    # Digits beyond those of the samples would differ between builds of numpy.
    rounded_low, rounded_high = float(f"{max(0.0, low):.7g}"), float(f"{high:.7g}")
    num_samples, num_all_runs, spread = counts
    return Estimate(
        middle,
        low=min(middle, rounded_low),
        high=max(middle, rounded_high),
        count=num_samples,
        runs=num_all_runs,
        spread=spread,
        method=method,
        standard_error=error,
        degrees_of_freedom=degrees_of_freedom,
        scatter_between_runs=between,
        scatter=scatter,
    )


def compare_times(reference: Estimate, other: Estimate, weight: float = 1.0) -> TimeComparison:
    """Return the ratio of two times, with its interval and a verdict.

    The verdict is `faster` or `slower` if the 95% interval excludes 1, and otherwise `within noise`. It is `too
    few samples` if one of the times has no interval. A single run is assumed to scatter at least as much as the
    runs on the other side.

    Args:
        reference: Time of the reference.
        other: Time that is compared.
        weight: Factor on `other`, such as the reference's tokens over the other's.
    """
    ratio = weight * other.median / reference.median
    if reference.standard_error is None or other.standard_error is None:
        return TimeComparison(ratio, None, None, TimeVerdict.UNKNOWN)
    distances = _interval_distances(reference, other)
    low, high = ratio * math.exp(-distances.below), ratio * math.exp(distances.above)
    verdict = TimeVerdict.SLOWER if ratio > 1 else TimeVerdict.FASTER
    is_undecidable = False
    if low <= 1 <= high:
        verdict = TimeVerdict.NOISE
        is_undecidable = abs(math.log(ratio)) > _distance_decided_by_repeats(reference, other)
    return TimeComparison(
        ratio,
        low,
        high,
        verdict,
        smallest=math.expm1(max(distances.below, distances.above)),
        chance=_p_value(ratio, distances),
        is_undecidable=is_undecidable,
    )


def adjust_verdicts(comparisons: Sequence[TimeComparison]) -> list[TimeComparison]:
    """Return comparisons with one reference, corrected for their number by Holm's rule (1979).

    Among many pairs of equal times, one can look different by chance. A verdict that the rule does not confirm
    becomes `within noise`, and its `among` states the number of comparisons. A single comparison stays as it is.
    """
    p_values = {
        index: comparison.chance
        for index, comparison in enumerate(comparisons)
        if comparison.chance is not None
    }
    result = list(comparisons)
    if len(p_values) < 2:
        # For a single pair the interval decides alone.
        return result
    still_holds = True
    num_untested = len(p_values)
    for index in sorted(p_values, key=p_values.__getitem__):
        # From the first p-value above its bound on, no verdict is confirmed.
        still_holds = still_holds and p_values[index] <= (1 - CONFIDENCE) / num_untested
        num_untested -= 1
        if not still_holds and comparisons[index].verdict.is_clear:
            result[index] = replace(
                comparisons[index], verdict=TimeVerdict.NOISE, among=len(p_values)
            )
    return result


def smallest_visible_difference(runs: int, scatter: float, assumed_freedom: float) -> float:
    """Return the smallest relative time difference that `runs` runs on each side can show.

    Args:
        runs: Number of runs per side.
        scatter: Relative standard deviation between runs.
        assumed_freedom: Degrees of freedom of this scatter if the runs are too few to show their own.
    """
    freedom = 2 * runs - 2 if runs >= REPEATS_FOR_TRUST else assumed_freedom
    factor = student_quantile(freedom)
    return math.expm1(factor * scatter * math.sqrt(2 / runs))


@functools.lru_cache(maxsize=256)
def student_quantile(freedom: float) -> float:
    """Return the two-sided 95% quantile of Student's t distribution.

    `freedom` is the number of degrees of freedom. Between whole numbers the quantile is interpolated linearly in
    1/freedom.
    """
    if freedom <= len(_STUDENT):
        reciprocals = 1 / np.arange(len(_STUDENT), 0, -1)
        return float(np.interp(1 / max(freedom, 1.0), reciprocals, _STUDENT[::-1]))
    return NORMAL + 2.4 / freedom + 3 / freedom**2


@dataclass(frozen=True)
class _IntervalDistances:
    """Distances from the logarithm of a ratio to the ends of its 95% interval."""

    below: float
    above: float
    degrees_of_freedom: float
    """Infinite if a scatter is assumed: the distances then hold the doubt about it, and no tail is added."""


def _p_value(ratio: float, distances: _IntervalDistances) -> float:
    """Return the two-sided p-value: how likely a ratio at least this far from 1 is if both times are equal."""
    freedom = distances.degrees_of_freedom
    half_width = distances.below if ratio > 1 else distances.above
    standard_errors = 0.0
    if half_width and ratio:
        standard_errors = abs(math.log(ratio)) / half_width * student_quantile(freedom)
    if math.isfinite(freedom):
        # Wallace (1959) turns Student's t into a normal deviate.
        shrunk = math.sqrt(freedom * math.log1p(standard_errors**2 / freedom))
        standard_errors = (8 * freedom + 1) / (8 * freedom + 3) * shrunk
    return math.erfc(standard_errors / math.sqrt(2))


def _interval_distances(reference: Estimate, other: Estimate) -> _IntervalDistances:
    """Return the distances, in logarithms, from the ratio of two times to the ends of its interval.

    Welch's t gives them if the scatter between runs is known on both sides. Otherwise the distances of the two
    times are combined.
    """
    if reference.degrees_of_freedom and other.degrees_of_freedom:
        return _welch_distances(reference, other)
    reference_below, reference_above = _log_distances(reference, other)
    below, above = _log_distances(other, reference)
    # The distances of both intervals add up as squares, each on its side (Zou & Donner 2008).
    return _IntervalDistances(
        math.hypot(below, reference_above), math.hypot(above, reference_below), math.inf
    )


def _welch_distances(reference: Estimate, other: Estimate) -> _IntervalDistances:
    """Return the distances by Welch's t, because one strategy may scatter by ten times as much as another.

    For three runs against five, Welch's t has too many degrees of freedom by chance. They are therefore averaged
    with the degrees of freedom of the side that scatters more.
    """
    # Repeats that are equal to the last digit still differ by rounding.
    least_error = 1e-9
    variances = [
        (max(estimate.standard_error or 0.0, least_error) ** 2, estimate.degrees_of_freedom or 0)
        for estimate in (reference, other)
    ]
    (narrow, narrow_freedom), (wide, wide_freedom) = sorted(variances)
    welch_freedom = (narrow + wide) ** 2 / (narrow**2 / narrow_freedom + wide**2 / wide_freedom)
    freedom = 2 / (1 / welch_freedom + 1 / wide_freedom)
    half_width = student_quantile(freedom) * math.sqrt(narrow + wide)
    return _IntervalDistances(half_width, half_width, freedom)


def _log_distances(estimate: Estimate, compared: Estimate) -> tuple[float, float]:
    """Return the distances from a time to the ends of its interval, in logarithms: below, then above.

    The interval of a single run is widened if the runs of `compared` scatter by more than the assumed scatter.
    """
    # The logarithm of an end at 0 would be infinite.
    least = 1e-9 * estimate.median
    below = abs(math.log(max(estimate.low or 0.0, least) / estimate.median))
    above = abs(math.log(max(estimate.high or 0.0, least) / estimate.median))
    added = _find_added_distance(estimate, compared) if estimate.is_single_run else 0.0
    # Independent distances add up as squares.
    return math.hypot(below, added), math.hypot(above, added)


def _find_added_distance(single: Estimate, compared: Estimate) -> float:
    """Return the distance by which the interval of a single run is widened, in logarithms.

    The interval of a single run rests on an assumed scatter between runs. If the runs of `compared` scatter by more,
    the single run may too, so the distance stands for the scatter beyond the assumed one. Otherwise it is 0.
    """
    measured = compared.scatter_between_runs or 0.0
    assumed = single.scatter.assumed
    if measured <= assumed:
        return 0.0
    quantile = student_quantile(single.scatter.degrees_of_freedom)
    return quantile * math.sqrt(measured**2 - assumed**2)


def _distance_decided_by_repeats(reference: Estimate, other: Estimate) -> float:
    """Return the log ratio of two times up to which several runs on one side decide that there is no difference.

    A larger ratio is undecided, because the other side is a single run. The result is 0 if the iterations of the
    single run scatter so much that no ratio is decided. It is infinite, so that every ratio is decided, if both sides
    have one run or both have several.
    """
    if reference.is_single_run == other.is_single_run:
        return math.inf
    single, several = (reference, other) if reference.is_single_run else (other, reference)
    # The standard error of a single run is made of the scatter within the run and of the assumed scatter between runs.
    assumed = single.scatter.assumed
    within_variance = (single.standard_error or 0.0) ** 2 - assumed**2
    within_half_width = NORMAL * math.sqrt(max(0.0, within_variance))
    if within_half_width > assumed:
        return 0.0
    # Independent half widths add up as squares.
    return math.hypot(max(_log_distances(several, several)), within_half_width)
