import random

import numpy as np
import pytest

from parakit.reporting.analyse.resampling import block_length, order_statistics_interval
from parakit.reporting.analyse.statistics import (
    ON_CPU_RANKS,
    ON_GPUS,
    IntervalMethod,
    Scatter,
    TimeVerdict,
    adjust_verdicts,
    compare_times,
    estimate_from_medians,
    estimate_time,
    smallest_visible_difference,
    student_quantile,
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
    estimate = estimate_time([[1.0, 2.0, 3.0, 4.0, 100.0]])
    assert estimate is not None
    assert (estimate.median, estimate.low, estimate.high) == (3.0, None, None)
    assert estimate.method is IntervalMethod.NONE


def test_six_samples_have_their_extremes_and_the_scatter_of_runs_as_interval():
    estimate = estimate_time([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    assert estimate is not None
    assert estimate.median == 3.5
    assert (estimate.low, estimate.high) == pytest.approx((1.0, 6.0), abs=0.01)
    assert (estimate.low < 1.0, estimate.high > 6.0) == (True, True)
    assert estimate.method is IntervalMethod.ORDER


# Ranks of the median's 95% interval as every table of the sign test has them.
@pytest.mark.parametrize(("count", "low"), [(6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (19, 5)])
def test_order_interval_takes_the_tabulated_ranks(count, low):
    assert order_statistics_interval(np.arange(1.0, count + 1)) == (low, count + 1 - low)


def test_twenty_samples_are_bootstrapped():
    estimate = estimate_time([run(100, 0.01, 20)])
    assert estimate is not None
    assert estimate.method is IntervalMethod.BOOTSTRAP
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low <= estimate.median <= estimate.high


def test_no_samples_have_no_estimate():
    assert estimate_time([]) is None
    assert estimate_time([[]]) is None


def test_equal_samples_give_their_value_exactly():
    estimate = estimate_time([[7.5] * 30])
    assert estimate is not None
    assert (estimate.median, estimate.spread) == (7.5, 0.0)
    # One run does not show the scatter between runs: 2% is assumed, with the quantile of three degrees.
    assert (estimate.low, estimate.high) == pytest.approx((7.022633, 7.977367))


def test_the_same_samples_give_the_same_interval():
    samples = [run(100, 0.05)]
    assert estimate_time(samples) == estimate_time(samples)


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
        estimate = estimate_time([autocorrelated(phi, 200, generator)])
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        hits += estimate.low <= 100 <= estimate.high
    assert hits >= 50


def width(samples):
    estimate = estimate_time([samples], scatter=Scatter(0.0, 0.0, "none", degrees_of_freedom=3))
    assert estimate is not None
    assert estimate.low < estimate.median < estimate.high
    return estimate.high - estimate.low


@pytest.mark.parametrize("phi", [0.0, 0.8])
def test_a_long_run_has_the_interval_of_the_bootstrap_without_its_draws(phi):
    samples = autocorrelated(phi, 10_001, np.random.default_rng(3))
    assert width(samples) == pytest.approx(width(samples[:10_000]), rel=0.1)
    assert width(np.tile(samples, 4)) == pytest.approx(width(samples) / 2, rel=0.2)


@pytest.mark.parametrize("samples", [[7.5] * 20_000, [195.0, 223.0] * 10_000])
def test_a_long_run_of_one_or_two_values_has_an_interval_that_holds_its_median(samples):
    estimate = estimate_time([samples])
    assert estimate is not None
    assert estimate.low <= estimate.median <= estimate.high


def test_repeats_that_differ_widen_the_interval():
    alike = estimate_time([run(100, 0.01, 50, 1), run(100, 0.01, 50, 2), run(100, 0.01, 50, 3)])
    apart = estimate_time([run(95, 0.01, 50, 1), run(100, 0.01, 50, 2), run(105, 0.01, 50, 3)])
    assert alike is not None
    assert apart is not None
    assert apart.high - apart.low > 5 * (alike.high - alike.low)
    assert (apart.runs, apart.count) == (3, 150)


def known(*runs, **options):
    estimate = estimate_time(runs, **options)
    assert estimate is not None
    return estimate


@pytest.mark.parametrize(("percent", "verdict"), [(3, TimeVerdict.NOISE), (12, TimeVerdict.SLOWER)])
def test_one_run_each_calls_only_what_runs_do_not_scatter_by(percent, verdict):
    comparison = compare_times(known(run(100, 0.005)), known(run(100 + percent, 0.005, seed=1)))
    assert comparison.verdict is verdict
    assert comparison.smallest == pytest.approx(0.094, abs=0.002)


def test_faster_is_called_too():
    comparison = compare_times(known(run(100, 0.005)), known(run(90, 0.005, seed=1)))
    assert comparison.verdict is TimeVerdict.FASTER
    assert comparison.low < 0.9 < comparison.high < 0.99


def test_on_cpu_ranks_runs_are_known_to_scatter_more():
    first, two = ([run(level, 0.005)] for level in (100, 115))
    assert compare_times(known(*first), known(*two)).verdict is TimeVerdict.SLOWER
    on_cpu = (known(*side, scatter=ON_CPU_RANKS) for side in (first, two))
    assert compare_times(*on_cpu).verdict is TimeVerdict.NOISE


def repeats(level, between, count, generator, length=8):
    """Runs whose own levels scatter, with little noise inside each."""
    return [
        level * (1 + between * generator.standard_normal())
        * (1 + 0.002 * generator.standard_normal(length))
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "between"), [(1, 0.01), (2, 0.01), (3, 0.02), (5, 0.005)])
def test_at_most_six_percent_of_equal_configurations_are_called_different(between, count):
    """In 2000 to 4000 pairs of each kind at most 5.2% were; 300 of one seed scatter by 1.3%."""
    generator = np.random.default_rng(2)
    false, pairs = 0, 300
    for _ in range(pairs):
        first, two = (known(*repeats(100, between, count, generator)) for _ in range(2))
        false += compare_times(first, two).verdict is not TimeVerdict.NOISE
    assert false <= 0.06 * pairs


def estimate_of_drawn_runs(runs, between, generator):
    """Return the estimate of so many runs of a true time of 100 with this scatter and little noise within."""
    medians = (100 * (1 + between * generator.standard_normal(runs))).tolist()
    within = [(median * 0.999, median * 1.001) for median in medians]
    counts = (100 * runs, runs, 0.005)
    return estimate_from_medians(medians, within, ON_GPUS, counts, IntervalMethod.BOOTSTRAP)


SIDES = [(runs, between) for runs in (1, 2) for between in (0.003, 0.03)]
SIDES += [(runs, between) for runs in (3, 5) for between in (0.003, 0.01, 0.03)]


@pytest.fixture(scope="module")
def drawn_estimates():
    generator = np.random.default_rng(64)
    return {
        side: [[estimate_of_drawn_runs(*side, generator) for _ in range(1500)] for _ in range(2)]
        for side in SIDES
    }


@pytest.mark.parametrize(("index", "side"), list(enumerate(SIDES)))
def test_equal_times_get_at_most_six_percent_of_verdicts_whatever_the_other_side_is(
    index, side, drawn_estimates
):
    estimates, _ = drawn_estimates[side]
    rates = {}
    for other_side in SIDES[index:]:
        _, other_rows = drawn_estimates[other_side]
        verdicts = [
            compare_times(*pair).verdict for pair in zip(estimates, other_rows, strict=True)
        ]
        rates[other_side] = sum(verdict.is_clear for verdict in verdicts) / len(verdicts)
    assert {side: rate for side, rate in rates.items() if rate > 0.06} == {}


def test_a_single_run_scatters_at_least_as_much_as_the_runs_beside_it():
    single = known(run(106, 0.001))
    calm = known(*(run(level, 0.001) for level in (99.9, 100, 100.1)))
    wild = known(*(run(level, 0.001) for level in (94, 100, 106)))
    assert compare_times(wild, single).smallest > 2 * compare_times(calm, single).smallest
    assert compare_times(wild, known(run(120, 0.001))).verdict is TimeVerdict.NOISE


def test_one_noisy_run_against_several_is_undecidable():
    several = known(*(run(level, 0.001) for level in (99.9, 100, 100.1, 100.05)))
    for single in (run(104, 0.001), run(101, 0.2)):
        compared = compare_times(several, known(single))
        assert (compared.verdict.is_clear, compared.is_undecidable) == (False, True)
        assert compared.outcome == "undecidable with a single run"
    # A small difference is within noise, and a large one is decided.
    assert not compare_times(several, known(run(100.1, 0.001))).is_undecidable
    assert compare_times(several, known(run(112, 0.001))).verdict is TimeVerdict.SLOWER
    # Two single runs, or two sides with repeats, are no such case.
    assert not compare_times(known(run(100, 0.001)), known(run(104, 0.001))).is_undecidable
    assert not compare_times(several, several).is_undecidable


def test_sides_that_scatter_unequally_are_not_called_different():
    """Where both sides' runs were taken to scatter alike, 16 to 20% of such pairs were."""
    sides = ((0.005, 5), (0.02, 3))
    generator = np.random.default_rng(4)
    false, pairs = 0, 400
    for _ in range(pairs):
        first, second = (known(*repeats(100, *side, generator)) for side in sides)
        false += compare_times(first, second).verdict is not TimeVerdict.NOISE
    assert false <= 0.07 * pairs


def test_a_quantile_between_two_degrees_of_freedom_is_between_theirs():
    assert student_quantile(2) == pytest.approx(4.30265)
    assert 3.55 < student_quantile(2.5) < 3.65
    assert student_quantile(30) == pytest.approx(2.042, abs=0.002)


def test_among_many_equal_rows_hardly_ever_one_is_called_faster():
    generator = np.random.default_rng(8)
    called = {"alone": 0, "together": 0}
    for _ in range(60):
        # Single runs that scatter by more than is assumed get a wrong verdict in 3.4% of pairs.
        reference, *other_rows = (known(*repeats(100, 0.03, 1, generator)) for _ in range(16))
        comparisons = [compare_times(reference, other) for other in other_rows]
        called["alone"] += any(item.verdict.is_clear for item in comparisons)
        called["together"] += any(item.verdict.is_clear for item in adjust_verdicts(comparisons))
    assert called["together"] <= 6 < called["alone"]


def test_a_verdict_among_others_says_so_and_a_large_one_stays():
    reference = known(run(100, 0.001))
    levels = (90.5, 110, 140)
    parities = adjust_verdicts(
        [compare_times(reference, known(run(level, 0.001))) for level in levels]
    )
    assert [item.verdict for item in parities] == [*2 * [TimeVerdict.NOISE], TimeVerdict.SLOWER]
    assert [item.among for item in parities] == [3, 3, 0]
    alone = compare_times(reference, known(run(90.5, 0.001)))
    assert adjust_verdicts([alone]) == [alone]


def test_three_quiet_runs_see_what_one_run_each_cannot():
    generator = np.random.default_rng(5)
    seen = {}
    for count in (1, 3):
        first, two = (known(*repeats(level, 0.003, count, generator)) for level in (100, 102))
        seen[count] = compare_times(first, two).verdict
    assert seen == {1: TimeVerdict.NOISE, 3: TimeVerdict.SLOWER}


def test_the_lost_power_is_a_number():
    assert smallest_visible_difference(1, 0.011, 3) == pytest.approx(0.0508, abs=0.001)
    assert smallest_visible_difference(3, 0.005, 3) == pytest.approx(0.0114, abs=0.0001)


def test_interval_of_three_runs_is_students():
    estimate = known([99.0] * 8, [100.0] * 8, [101.0] * 8)
    assert (estimate.method, estimate.degrees_of_freedom) == (IntervalMethod.RUNS, 2)
    assert (estimate.low, estimate.high) == pytest.approx((100 - 2.4842, 100 + 2.4842), abs=1e-3)


def test_runs_that_scatter_more_than_repeats_do_disagree():
    assert known([90.0] * 8, [110.0] * 8).repeats_disagree
    assert not known([99.0] * 8, [101.0] * 8).repeats_disagree


def test_a_short_run_does_not_count_as_much_as_a_long_one():
    assert known([100.0] * 50, [300.0]).median == 100.0


def test_run_against_itself_is_within_noise_with_a_real_interval():
    estimate = known(run(100, 0.02))
    compared = compare_times(estimate, estimate)
    assert compared.verdict is TimeVerdict.NOISE
    assert compared.low < 1 < compared.high


def test_too_few_samples_have_no_verdict():
    few = estimate_time([[1.0, 2.0]])
    assert few is not None
    assert compare_times(few, few).verdict is TimeVerdict.UNKNOWN


def test_small_samples_are_compared_by_their_intervals():
    first, two = (
        estimate_time([[100.0 + k / 10 for k in range(8)]]),
        estimate_time([[120.0 + k / 10 for k in range(8)]]),
    )
    assert first is not None
    assert two is not None
    assert compare_times(first, two).verdict is TimeVerdict.SLOWER


def test_weight_compares_times_a_token():
    first, two = estimate_time([[100.0] * 30]), estimate_time([[200.0] * 30])
    assert first is not None
    assert two is not None
    assert compare_times(first, two, weight=0.5).ratio == 1.0


def test_an_interval_without_scatter_still_holds_its_median() -> None:
    estimate = estimate_time([[100 / 3] * 8] * 3)
    assert estimate is not None
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low <= estimate.median <= estimate.high


@pytest.mark.parametrize(
    ("verdict", "sentence_text"),
    [
        (TimeVerdict.SLOWER, "slower than tp2"),
        (TimeVerdict.NOISE, "within noise of tp2"),
        (TimeVerdict.UNKNOWN, "of unknown speed against tp2 (too few samples)"),
    ],
)
def test_every_verdict_makes_a_sentence(verdict: TimeVerdict, sentence_text: str) -> None:
    assert verdict.against("tp2") == sentence_text
    assert verdict.is_clear == (verdict is TimeVerdict.SLOWER)


# scipy.stats.t.ppf(0.975, freedom) of scipy 1.18.1.
@pytest.mark.parametrize(
    ("freedom", "quantile", "tolerance"),
    [
        (2, 4.302653, 1e-5),
        (2.5, 3.574655, 0.02),
        (3.7, 2.867521, 0.01),
        (7.2, 2.351374, 0.002),
        (21, 2.079614, 7e-4),
        (30.5, 2.040869, 7e-4),
    ],
)
def test_student_quantile_is_that_of_scipy(freedom, quantile, tolerance):
    assert student_quantile(freedom) == pytest.approx(quantile, rel=tolerance)
