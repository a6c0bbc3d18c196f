import pytest

from tools.launch.experiment.bench_ledger import BenchError, by_call, cost_of, kinds
from tools.launch.options import options_from_environment


def times(fastest_ms: float, scatter_ms: float = 0.01) -> list[float]:
    return [fastest_ms + scatter_ms * (k % 10) for k in range(100)]


def test_cost_is_the_ratio_of_the_fastest_halves_with_its_interval() -> None:
    cost = cost_of(times(100), times(101))
    assert cost.ratio == pytest.approx(1.01, rel=1e-3)
    assert cost.low < cost.ratio < cost.high
    assert cost.verdict == "at most 2%: kept"
    assert "×1.0100" in str(cost)


def test_what_other_load_adds_to_some_iterations_is_left_out() -> None:
    disturbed = [ms + 50 * (k % 3 == 0) for k, ms in enumerate(times(100))]
    assert cost_of(times(100), disturbed).ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("on", "verdict"),
    [
        (times(110), "more than 2%: not kept"),
        (times(101, 9), "the interval holds 2%: too noisy to tell; measure longer (ITERS=)"),
    ],
)
def test_verdict_follows_the_interval(on: list[float], verdict: str) -> None:
    assert cost_of(times(100, 9 if "noisy" in verdict else 0.01), on).verdict == verdict


def test_few_iterations_are_a_sentence() -> None:
    with pytest.raises(BenchError, match="Only 3 iterations of each kind count; raise ITERS"):
        cost_of([1.0] * 3, [1.0] * 30)


def test_odd_iterations_are_not_watched_and_warm_up_does_not_count() -> None:
    assert kinds({i: float(i) for i in range(1, 15)}) == ([11, 13], [12, 14])


def test_cost_of_a_call_times_the_calls_of_an_iteration() -> None:
    assert by_call((20_000.0, 30_000.0), 100, 50.0) == (
        "one call: 20.0 µs plain, 30.0 µs watched; 100 calls an iteration make 1.00 ms of 50.0 ms, 2.0%"
    )


def test_ledger_is_on_unless_switched_off() -> None:
    assert options_from_environment({}).ledger
    assert not options_from_environment({"LEDGER": "0"}).ledger
