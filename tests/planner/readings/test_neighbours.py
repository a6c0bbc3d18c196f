from dataclasses import replace

import pytest

from parakit.config.model import load_model
from parakit.config.run import spec_from_model
from parakit.config.strategy import Batch, Parallelism
from parakit.planner.readings.facts import model_facts
from parakit.planner.readings.intervals import TimeInterval
from parakit.planner.readings.neighbours import Uncertainty, find_near_residuals
from parakit.planner.readings.published import usual_cluster


def test_neighbours_of_a_dense_model_are_dense_and_of_distinct_configurations() -> None:
    model = load_model("gpt3-13b")
    wide = replace(model.shape, layers=48, hidden=7168, heads=56, query_groups=56, ffn_hidden=28672)
    spec = spec_from_model(replace(model, shape=wide), Parallelism(data=64), Batch(1, 64))
    measurements = [
        item.measurement for _, item in find_near_residuals(spec, usual_cluster("gb200", 64))
    ]
    assert measurements
    assert not any(model_facts(measurement.model).get("experts") for measurement in measurements)
    layouts = [
        (r.model, r.gpus, r.tp, r.pp, r.vpp, r.cp, r.ep, r.mbs, r.gbs, r.dtype)
        for r in measurements
    ]
    assert len(set(layouts)) == len(layouts)


def test_mixture_of_equal_degrees_is_no_neighbour_of_a_dense_model() -> None:
    spec = spec_from_model(load_model("gpt3-13b"), Parallelism(data=8), Batch(1, 8))
    measurements = [
        item.measurement for _, item in find_near_residuals(spec, usual_cluster("b200", 8))
    ]
    assert not any(model_facts(measurement.model).get("experts") for measurement in measurements)


def test_cp_and_ep_degrees_count_as_distance() -> None:
    model, cluster = load_model("llama3-8b"), usual_cluster("h100", 8)
    plain = spec_from_model(model, Parallelism(data=8), Batch(1, 8))
    split = spec_from_model(model, Parallelism(data=2, context=4), Batch(1, 8))
    (distance, nearest), *_ = find_near_residuals(plain, cluster)
    assert distance == pytest.approx(0, abs=0.01)
    assert (nearest.measurement.cp or 1) == 1
    assert find_near_residuals(split, cluster)[0][1].measurement.cp == 2


def test_warning_for_prediction_outside_its_interval_unless_both_print_identically() -> None:
    ends = dict.fromkeys((0.80, 0.95), (-0.2, -0.1))
    slower = Uncertainty("H100", 10.0, similar=TimeInterval(60, ends))
    assert "took longer than was predicted: expect 11.1 s to 12.2 s in place of" in slower.warning
    near = replace(slower, similar=TimeInterval(60, dict.fromkeys(ends, (-0.2, -0.001))))
    assert not near.warning


def test_runs_with_blocking_kernel_launches_are_no_neighbours() -> None:
    """Lucie-7B on 8 to 256 A100 would be the nearest by every counted property."""
    split = Parallelism(data=32, tensor=2)
    spec = spec_from_model(load_model("llama3-8b"), split, Batch(2, 256))
    sources = [
        item.measurement.source for _, item in find_near_residuals(spec, usual_cluster("a100", 64))
    ]
    assert sources
    assert not any("Lucie" in name for name in sources)
