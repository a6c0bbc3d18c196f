from types import SimpleNamespace
from typing import Any, cast

import pytest

from parakit.config.errors import LaunchError
from parakit.experiments.zero_prediction import (
    SETTINGS,
    PredictedMethod,
    format_scaling_table,
    judge_column,
    predict_methods,
    scaling_efficiency,
)
from parakit.planner.options import PlanOptions
from tests.given import run


def predicted(method: str, seconds: float, peak: int = 1, nodes: int = 2) -> PredictedMethod:
    candidate = SimpleNamespace(
        seconds=SimpleNamespace(total=seconds), memory=SimpleNamespace(total=peak)
    )
    timed = cast(Any, SimpleNamespace(candidate=candidate))
    return PredictedMethod(method, "ethernet-1g", nodes, timed)


def test_column_has_a_winner_or_the_methods_within_the_error_of_the_planner() -> None:
    clear = [predicted("Baseline", 2.0), predicted("Pipeline", 1.0)]
    assert judge_column(clear) == ("Pipeline", "Pipeline")
    close = [predicted("Baseline", 1.02, peak=1), predicted("Pipeline", 1.0, peak=2)]
    assert judge_column(close) == ("within noise: Baseline and Pipeline", "Baseline")


def test_scaling_efficiency_is_work_per_device_relative_to_two_nodes() -> None:
    predictions = [predicted("ZeRO-3", 1.0), predicted("ZeRO-3", 4.0, nodes=64)]
    assert scaling_efficiency("ZeRO-3", "ethernet-1g", 64, predictions) == 0.25
    assert scaling_efficiency("ZeRO-3", "ethernet-1g", 32, predictions) is None
    *_, row = format_scaling_table(predictions).splitlines()
    assert (
        row
        == "| ZeRO-3, 64 nodes | 25.0% | – | – | – | “scales very poorly”: confirmed at 1 Gbit/s |"
    )


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (0.47, "confirmed"),
        (0.51, "within noise of 50%"),
        (0.6, "neither"),
        (0.79, "within noise of 80%"),
        (0.9, "contradicted"),
    ],
)
def test_efficiency_near_a_limit_gives_no_verdict(share: float, verdict: str) -> None:
    predictions = [predicted("ZeRO-3", share), predicted("ZeRO-3", 1.0, nodes=64)]
    assert f"“scales very poorly”: {verdict} at 1 Gbit/s" in format_scaling_table(predictions)


def test_a_slow_link_favours_the_pipeline_and_a_fast_one_does_not() -> None:
    options = PlanOptions("gpt3-64m", "a100-80g")
    predictions = predict_methods(options, nodes=(2,), links=tuple(SETTINGS.links))
    fastest = {
        link: judge_column([prediction for prediction in predictions if prediction.link == link])[0]
        for link in SETTINGS.links
    }
    assert fastest["ethernet-1g"] == "Pipeline"
    assert "Pipeline" not in fastest["ib-400g"]
    # The batch of the report is two samples per forward pass, eight over two nodes.
    specs = {
        prediction.timed.candidate.spec.batch for prediction in predictions if prediction.timed
    }
    assert {(batch.micro_batch_size, batch.global_batch_size) for batch in specs} == {(2, 8)}


def test_stages_that_do_not_divide_the_layers_are_left_out() -> None:
    options = PlanOptions("gpt3-64m", "a100-80g")
    predictions = predict_methods(options, nodes=(4, 8), links=("ib-400g",))
    stages = [
        prediction for prediction in predictions if prediction.method == "Pipeline, a stage a node"
    ]
    assert [prediction.seconds is None for prediction in stages] == [False, True]  # 12 layers


def test_compare_zero_with_a_device_is_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare-zero", {"MODEL": "gpt3-64m", "GPU": "a100-80g", "DTYPE": "fp16"}) == 0
    printed = capsys.readouterr().out
    assert "predicted: gpt3-64m on nodes with one a100-80g each" in printed
    # The table of links is on two nodes.
    options = PlanOptions("gpt3-64m", "a100-80g", dtype="fp16")
    baseline, *_ = predict_methods(options, (2,), ("ethernet-1g",))
    assert f" {baseline.time_text.split()[0]} " in printed
    with pytest.raises(LaunchError, match="DTYPE= applies only to the prediction"):
        run("compare-zero", {"DTYPE": "fp16"})
    with pytest.raises(ValueError, match="There is no GPU 'a1000'"):
        run("compare-zero", {"MODEL": "gpt3-64m", "GPU": "a1000"})
