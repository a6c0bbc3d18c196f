from pathlib import Path

import pytest

from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.experiments.load import load_experiment
from parakit.launch.options import Options, options_from_texts
from parakit.reporting.analyse.statistics import TimeVerdict, compare_times, estimate_time
from tests.bench.ledger_cost import LedgerCost, by_call, cost_of, kinds, refuse_without_ledger
from tests.bench.within_runs import compare_within_runs, fastest_half


def times(fastest_ms: float, scatter_ms: float = 0.01) -> list[float]:
    return [fastest_ms + scatter_ms * (k % 10) for k in range(100)]


def cost(off_ms: list[float], on_ms: list[float]) -> LedgerCost:
    """Of a run whose odd iterations are off, after those that do not count."""
    pairs = [ms for pair in zip(off_ms, on_ms, strict=False) for ms in pair]
    return cost_of([{11 + n: ms for n, ms in enumerate(pairs)}])


def test_cost_is_the_ratio_of_the_fastest_halves_with_its_interval() -> None:
    found = cost(times(100), times(101))
    assert found.over.ratio == pytest.approx(1.01, rel=1e-3)
    assert found.over.low is not None
    assert found.over.high is not None
    assert found.over.low < found.over.ratio < found.over.high
    assert found.verdict == "at most 2%: kept"
    assert not found.is_above_limit
    assert "×1.0100" in str(found)
    assert "the fastest half of 100 iterations each" in str(found)


def test_what_other_load_adds_to_some_iterations_is_left_out() -> None:
    disturbed = [ms + 50 * (k % 3 == 0) for k, ms in enumerate(times(100))]
    assert cost(times(100), disturbed).over.ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("on", "verdict"),
    [
        (times(110), "more than 2%: not kept"),
        (times(101, 9), "the interval holds 2%: too noisy to tell; measure longer (ITERS=)"),
    ],
)
def test_verdict_follows_the_interval(on: list[float], verdict: str) -> None:
    found = cost(times(100, 9 if "noisy" in verdict else 0.01), on)
    assert found.verdict == verdict
    assert found.is_above_limit == ("not kept" in verdict)


def test_few_iterations_are_a_sentence() -> None:
    with pytest.raises(LaunchError, match="Only 3 iterations of each kind count; raise ITERS"):
        cost([1.0] * 3, [1.0] * 30)


def test_odd_iterations_are_not_watched_and_warm_up_does_not_count() -> None:
    assert kinds({i: float(i) for i in range(1, 15)}) == ([11, 13], [12, 14])


def test_without_the_ledger_there_is_nothing_to_measure() -> None:
    with pytest.raises(LaunchError, match="LEDGER=0 leaves nothing to measure"):
        refuse_without_ledger(load_experiment("bench_ledger", Options(ledger=False)))


def test_the_run_switches_the_ledger_and_lies_apart_from_others() -> None:
    experiment = load_experiment("bench_ledger", Options())
    assert [cell.job.target for cell in experiment.cells] == ["train-tp2-gpt2-tiny-2cpu"]
    assert experiment.file.environment == {variables.LEDGER_ALTERNATE: "1"}
    assert experiment.options.runs == Path("runs/bench-ledger")
    mine = load_experiment("bench_ledger", Options(runs=Path("mine")))
    assert mine.options.runs == Path("mine")


def test_cost_of_a_call_times_the_calls_of_an_iteration() -> None:
    assert by_call((20_000.0, 30_000.0), 100, 50.0) == (
        "one call: 20.0 µs plain, 30.0 µs watched; 100 calls an iteration make 1.00 ms of 50.0 ms, 2.0%"
    )


def test_ledger_is_on_unless_switched_off() -> None:
    assert options_from_texts({}).ledger
    assert not options_from_texts({"LEDGER": "0"}).ledger


def test_kinds_of_iterations_of_the_same_run_are_compared_more_finely_than_runs() -> None:
    one, two = times(100, 0.1), times(101, 0.1)
    runs = [estimate_time([kind]) for kind in (one, two)]
    assert runs[0] is not None
    assert runs[1] is not None
    assert compare_times(*runs).verdict is TimeVerdict.NOISE
    assert compare_within_runs([one], [two], fastest_half).verdict is TimeVerdict.SLOWER
