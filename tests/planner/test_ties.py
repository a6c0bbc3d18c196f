from collections.abc import Mapping
from dataclasses import replace

import pytest

import parakit
from parakit.config.run import RunSpec
from parakit.config.strategy import Batch, count_devices, parse_strategy
from parakit.costs import PredictedMemory
from parakit.planner.advice import tie_sentence
from parakit.planner.readings.published import usual_cluster
from parakit.planner.ties import (
    Preference,
    Usualness,
    choose_preferred,
    classify_usualness,
    find_deciding_field,
)
from parakit.planner.verdict import Fit
from tests.costs.test_memory import tiny


def build_spec(strategy: str) -> RunSpec:
    return replace(
        tiny(parse_strategy(strategy, count_devices(strategy, 8))), batch=Batch(1, 64), dtype="bf16"
    )


def preferred(seconds: Mapping[str, float], fractions: Mapping[str, float] | None = None) -> str:
    """Return the strategy that is preferred, by strategies with their seconds and fractions of the device."""
    cluster = usual_cluster("h100", 8)
    specs = {build_spec(strategy): strategy for strategy in seconds}

    def memory_of(spec: RunSpec) -> PredictedMemory:
        fraction = (fractions or {}).get(specs[spec], 0.5)
        return PredictedMemory(int(fraction * cluster.device.memory_bytes), 0, 0, 0, 0, 0, 0, 0)

    times = {spec: seconds[strategy] for spec, strategy in specs.items()}
    return specs[choose_preferred(times, memory_of, cluster)]


@pytest.mark.parametrize(
    ("usual", "unusual"),
    [
        ("dp8", "dp8-zero1"),
        ("dp8-zero1", "sp2dp4-zero1"),
        ("sp2dp4-zero1", "tp2dp4-zero1"),
        ("sp2dp4-zero1", "pp2dp4-zero1"),
        ("pp2dp4-zero1", "cp2dp4-zero1"),
        ("cp2dp4-zero1", "dp8-zero3"),
        ("pp2dp4-zero1", "pp2dp4"),
        ("sp4dp2-zero1", "sp4pp2"),
    ],
)
def test_the_more_usual_of_two_tied_strategies_is_preferred(usual: str, unusual: str) -> None:
    assert preferred({usual: 1.02, unusual: 1.0}) == usual


def test_a_strategy_that_is_clearly_faster_is_preferred_however_unusual_it_is() -> None:
    assert preferred({"dp8-zero1": 1.04, "dp8-zero3": 1.0}) == "dp8-zero3"


def test_sharded_weights_are_preferred_if_only_they_fit_by_a_margin() -> None:
    fractions = {"dp8-zero1": 0.93, "dp8-zero3": 0.5}
    assert preferred({"dp8-zero1": 1.0, "dp8-zero3": 1.02}, fractions) == "dp8-zero3"


def test_a_usual_strategy_with_room_is_preferred_to_one_that_fills_the_device() -> None:
    fractions = {"dp8-zero1": 0.8, "sp2dp4-zero1": 0.5}
    assert preferred({"dp8-zero1": 1.0, "sp2dp4-zero1": 1.02}, fractions) == "sp2dp4-zero1"


def test_tensor_parallelism_across_nodes_is_unusual() -> None:
    split = parse_strategy("sp16dp2-zero1", 32)
    assert classify_usualness(split, 8) is Usualness.UNUSUAL
    assert classify_usualness(split, 72) is Usualness.TENSOR


ROOMY = Preference(False, False, False, Usualness.PIPELINE, 2, 1.0)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (ROOMY._replace(is_close=True, usualness=Usualness.DATA), "is_close"),
        (ROOMY._replace(lacks_room=True, usualness=Usualness.TENSOR), "lacks_room"),
        (ROOMY._replace(usualness=Usualness.CONTEXT, seconds=0.9), "usualness"),
        (ROOMY._replace(num_kinds=3), "num_kinds"),
        (ROOMY, "seconds"),
        (None, "seconds"),
    ],
)
def test_the_first_field_that_differs_decides_between_tied_runs(
    other: Preference | None, field: str
) -> None:
    assert find_deciding_field(ROOMY, other) == field


def test_tied_strategies_that_nearly_fill_the_device_are_refused_for_that_reason() -> None:
    plan = parakit.plan("llama3-8b", gpus=8, gpu="h100").plan
    assert any(candidate.verdict is Fit.CLOSE for candidate in plan.tied)
    assert plan.ranked[0].verdict is Fit.FITS
    sentence = tie_sentence(plan)
    assert "close to the device's memory limit" in sentence
