"""The automatic choice: which strategies are trained, and how the table reports them."""

from rich.console import Console

from parakit.config.run import DeviceKind
from parakit.experiments.load import load_sweep
from parakit.launch.auto import build_request
from parakit.launch.calibrate import build_calibration
from parakit.launch.options import Options
from parakit.launch.train import compose_job
from parakit.planner.search import search_configurations
from parakit.reporting.analyse.statistics import estimate_time
from tests.bench.auto import (
    AutoRow,
    best_of,
    cell_of,
    chosen_candidates,
    loss_of,
    render,
)
from tests.launch.test_auto import CPU, FIGURES, GLOO, TINY

QUIET = Console(quiet=True)


def row(strategy: str, predicted: float, measured: float | None) -> AutoRow:
    estimate = None if measured is None else estimate_time([[measured] * 8])
    return AutoRow("gpt2-tiny", 2, f"{strategy}, 2", predicted, estimate)


def test_loss_of_a_choice_is_relative_to_the_fastest_measured_strategy() -> None:
    group = [row("tp2", 100, 110), row("dp2", 105, 100)]
    assert best_of(group) == group[1]
    assert round(loss_of(group) or 0, 6) == 0.1
    text = render([group])
    assert "Times within 15% of the measured: 2 of 2, mean |error| 7.0%" in text
    assert "Choice within 5% of the best measured: 0 of 1, mean loss 10.0%, worst 10.0%" in text
    assert "| gpt2-tiny | 2 | tp2, 2 | dp2, 2 | 10.0% |" in text


def test_a_run_that_failed_has_no_error_and_a_failed_choice_no_loss() -> None:
    group = [row("tp2", 100, None), row("dp2", 50, 100)]
    assert loss_of(group) is None
    assert "0 of 1, mean |error| 50.0%" in render([group])


def test_best_four_strategies_and_each_single_dimension_are_trained() -> None:
    calibration = build_calibration(FIGURES, DeviceKind.CPU, CPU, GLOO)
    plan = search_configurations(build_request(TINY, CPU, calibration))
    chosen = chosen_candidates(plan)
    assert chosen[:4] == plan.ranked[:4]
    assert {"dp2", "tp2"} <= {candidate.strategy for candidate in chosen}
    axes = {"MODELS": "gpt2-tiny", "DEVICES": "2cpu"}
    (cell, *_) = load_sweep("auto", Options(), axes).cells
    for candidate in chosen:
        launch = compose_job(cell_of(cell.job, candidate).job)
        assert launch.spec.batch == candidate.spec.batch
        assert launch.spec.parallelism == candidate.spec.parallelism


def test_default_experiment_has_five_models_on_two_and_four_ranks() -> None:
    cells = load_sweep("auto", Options(), {}).cells
    assert len({cell.job.model.name for cell in cells}) == 5
    assert {cell.job.devices for cell in cells} == {2, 4}
