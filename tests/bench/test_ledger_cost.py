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
    """Return the cost of a run whose odd iterations are unwatched, after its warm-up iterations."""
    pairs = [ms for pair in zip(off_ms, on_ms, strict=False) for ms in pair]
    return cost_of([{11 + n: ms for n, ms in enumerate(pairs)}])


def test_cost_is_the_ratio_of_the_fastest_halves_with_its_interval() -> None:
    ledger_cost = cost(times(100), times(101))
    assert ledger_cost.over.ratio == pytest.approx(1.01, rel=1e-3)
    assert ledger_cost.over.low is not None
    assert ledger_cost.over.high is not None
    assert ledger_cost.over.low < ledger_cost.over.ratio < ledger_cost.over.high
    assert ledger_cost.verdict == "at most 2%: kept"
    assert not ledger_cost.is_above_limit
    assert "×1.0100" in str(ledger_cost)
    assert "the fastest half of 100 iterations each" in str(ledger_cost)


def test_iterations_slowed_by_other_load_do_not_count() -> None:
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
    ledger_cost = cost(times(100, 9 if "noisy" in verdict else 0.01), on)
    assert ledger_cost.verdict == verdict
    assert ledger_cost.is_above_limit == ("not kept" in verdict)


def test_too_few_iterations_are_refused() -> None:
    with pytest.raises(LaunchError, match="Only 3 iterations of each kind count; raise ITERS"):
        cost([1.0] * 3, [1.0] * 30)


def test_odd_iterations_are_not_watched_and_warm_up_does_not_count() -> None:
    assert kinds({i: float(i) for i in range(1, 15)}) == ([11, 13], [12, 14])


def test_run_without_communication_log_is_refused() -> None:
    with pytest.raises(LaunchError, match="LEDGER=0 leaves nothing to measure"):
        refuse_without_ledger(load_experiment("bench_ledger", Options(ledger=False)))


def test_bench_run_alternates_the_communication_log_and_has_its_own_folder() -> None:
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


def test_comparison_within_a_run_detects_smaller_differences_than_between_runs() -> None:
    first, second = times(100, 0.1), times(101, 0.1)
    runs = [estimate_time([kind]) for kind in (first, second)]
    assert runs[0] is not None
    assert runs[1] is not None
    assert compare_times(*runs).verdict is TimeVerdict.NOISE
    assert compare_within_runs([first], [second], fastest_half).verdict is TimeVerdict.SLOWER
