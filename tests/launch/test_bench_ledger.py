import pytest

from tools.launch.bench_ledger import (
    BenchError,
    Cost,
    Measured,
    by_call,
    cost_of,
    fastest_tenth,
    order,
)
from tools.launch.options import options_from_environment


def runs(*medians: float, processor: float = 10.0) -> list[Measured]:
    return [Measured(tuple(m + 0.01 * (k % 5) for k in range(20)), processor) for m in medians]


def test_on_and_off_take_turns_and_so_does_who_is_first() -> None:
    assert order(3) == [False, True, True, False, False, True]


def test_cost_is_the_ratio_of_medians_with_its_interval() -> None:
    cost = cost_of(runs(100, 100, 100), runs(101, 101, 101, processor=10.5))
    assert cost.ratio.ratio == pytest.approx(1.01, rel=1e-3)
    assert cost.processor_ratio == pytest.approx(1.05)
    assert cost.verdict == "at most 2%: kept"
    assert "×1.010" in str(cost)


@pytest.mark.parametrize(
    ("on", "verdict"),
    [
        ((110, 110, 110), "more than 2%: not kept"),
        ((90, 102, 115), "the interval holds 2%: too noisy to tell; repeat more often (REPEATS=)"),
    ],
)
def test_verdict_follows_the_interval(on: tuple[float, ...], verdict: str) -> None:
    assert cost_of(runs(100, 100, 100), runs(*on)).verdict == verdict


def test_few_samples_have_no_verdict() -> None:
    cost = cost_of([Measured((1.0,), 1.0)], [Measured((1.0,), 1.0)])
    assert isinstance(cost, Cost)
    assert cost.verdict == "too few samples to tell"


def test_run_without_iterations_is_a_sentence() -> None:
    with pytest.raises(BenchError, match="raise ITERS"):
        cost_of([Measured((), 1.0)], [Measured((), 1.0)])


def test_cost_of_a_call_times_the_calls_of_an_iteration() -> None:
    assert by_call((20_000.0, 30_000.0), 100, 50.0) == (
        "one call: 20.0 µs plain, 30.0 µs watched; 100 calls an iteration make 1.00 ms of 50.0 ms, 2.0%"
    )


def test_fastest_tenth_is_what_load_does_not_reach() -> None:
    assert fastest_tenth([9.0, *range(20, 0, -1)]) == 3


def test_ledger_is_on_unless_switched_off() -> None:
    assert options_from_environment({}).ledger
    assert not options_from_environment({"LEDGER": "0"}).ledger
