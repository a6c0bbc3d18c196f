import random

import numpy as np
import pytest

from tools.report.analyse.statistics import (
    Method,
    Verdict,
    block_length,
    compare,
    estimate,
    order_interval,
)


def run(level, relative_noise, count=100, seed=0):
    generator = random.Random(seed)
    return [level * (1 + relative_noise * generator.gauss(0, 1)) for _ in range(count)]


def autocorrelated(phi, count, generator):
    values = np.zeros(count + 100)
    for k, shock in enumerate(generator.standard_normal(count + 99), start=1):
        values[k] = phi * values[k - 1] + shock
    return 100 + values[100:]


def test_median_of_few_samples_has_no_interval():
    found = estimate([[1.0, 2.0, 3.0, 4.0, 100.0]])
    assert found is not None
    assert (found.median, found.low, found.high) == (3.0, None, None)
    assert found.method is Method.NONE


def test_six_samples_have_their_extremes_as_interval():
    found = estimate([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    assert found is not None
    assert (found.median, found.low, found.high) == (3.5, 1.0, 6.0)
    assert found.method is Method.ORDER


# Ranks of the median's 95% interval as every table of the sign test has them.
@pytest.mark.parametrize(("count", "low"), [(6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (19, 5)])
def test_order_interval_takes_the_tabulated_ranks(count, low):
    assert order_interval(np.arange(1.0, count + 1)) == (low, count + 1 - low)


def test_twenty_samples_are_bootstrapped():
    found = estimate([run(100, 0.01, 20)])
    assert found is not None
    assert found.method is Method.BOOTSTRAP
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.median <= found.high


def test_no_samples_have_no_estimate():
    assert estimate([]) is None
    assert estimate([[]]) is None


def test_equal_samples_give_their_value_exactly():
    found = estimate([[7.5] * 30])
    assert found is not None
    assert (found.median, found.low, found.high, found.spread) == (7.5, 7.5, 7.5, 0.0)


def test_the_same_samples_give_the_same_interval():
    samples = [run(100, 0.05)]
    assert estimate(samples) == estimate(samples)


def test_blocks_grow_with_autocorrelation():
    generator = np.random.default_rng(1)
    independent = block_length(autocorrelated(0.0, 400, generator))
    correlated = block_length(autocorrelated(0.8, 400, generator))
    assert independent <= 4
    assert correlated >= 3 * independent


@pytest.mark.parametrize("phi", [0.0, 0.6])
def test_interval_holds_the_true_median_nearly_as_often_as_promised(phi):
    generator = np.random.default_rng(7)
    hits = 0
    for _ in range(60):
        found = estimate([autocorrelated(phi, 200, generator)])
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 100 <= found.high
    assert hits >= 50


def test_repeats_that_differ_widen_the_interval():
    alike = estimate([run(100, 0.01, 50, 1), run(100, 0.01, 50, 2), run(100, 0.01, 50, 3)])
    apart = estimate([run(95, 0.01, 50, 1), run(100, 0.01, 50, 2), run(105, 0.01, 50, 3)])
    assert alike is not None
    assert apart is not None
    assert apart.high - apart.low > 5 * (alike.high - alike.low)
    assert (apart.runs, apart.count) == (3, 150)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("noise", "verdict"), [(0.05, Verdict.NOISE), (0.005, Verdict.SLOWER)])
def test_three_percent_is_called_only_outside_the_noise(noise, verdict, seed):
    reference = estimate([run(100, noise, seed=seed)])
    other = estimate([run(103, noise, seed=seed + 100)])
    assert reference is not None
    assert other is not None
    assert compare(reference, other).verdict is verdict


def test_faster_is_called_too():
    reference, other = estimate([run(100, 0.005)]), estimate([run(90, 0.005, seed=1)])
    assert reference is not None
    assert other is not None
    found = compare(reference, other)
    assert found.verdict is Verdict.FASTER
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.9 < found.high
    assert found.high - found.low < 0.02


def test_run_against_itself_is_within_noise_with_a_real_interval():
    found = estimate([run(100, 0.02)])
    assert found is not None
    compared = compare(found, found)
    assert compared.verdict is Verdict.NOISE
    assert compared.low < 1 < compared.high


def test_too_few_samples_have_no_verdict():
    few = estimate([[1.0, 2.0]])
    assert few is not None
    assert compare(few, few).verdict is Verdict.UNKNOWN


def test_small_samples_are_compared_by_their_intervals():
    one, two = (
        estimate([[100.0 + k / 10 for k in range(8)]]),
        estimate([[120.0 + k / 10 for k in range(8)]]),
    )
    assert one is not None
    assert two is not None
    assert compare(one, two).verdict is Verdict.SLOWER


def test_three_repeats_each_are_trusted_below_the_spread_of_iterations():
    slow = [run(103, 0.05, 400, seed) for seed in range(3)]
    fast = [run(100, 0.05, 400, seed + 10) for seed in range(3)]
    reference, other = estimate(fast), estimate(slow)
    assert reference is not None
    assert other is not None
    found = compare(reference, other)
    assert (found.verdict, found.noise) == (Verdict.SLOWER, 0.0)


def test_weight_compares_times_a_token():
    one, two = estimate([[100.0] * 30]), estimate([[200.0] * 30])
    assert one is not None
    assert two is not None
    assert compare(one, two, weight=0.5).ratio == 1.0
