from dataclasses import replace

import pytest

from parakit.config.model import load_model
from parakit.config.run import spec_from_model
from parakit.config.strategy import Batch, Parallelism
from parakit.planner.readings.facts import model_facts
from parakit.planner.readings.intervals import TimeInterval
from parakit.planner.readings.neighbours import Uncertainty, find_near_residuals
from parakit.planner.readings.published import usual_cluster


def test_a_dense_model_is_not_judged_by_mixtures_nor_by_one_layout_of_several_releases() -> None:
    model = load_model("gpt3-13b")
    wide = replace(model.shape, layers=48, hidden=7168, heads=56, query_groups=56, ffn_hidden=28672)
    spec = spec_from_model(replace(model, shape=wide), Parallelism(data=64), Batch(1, 64))
    found = [item.measurement for _, item in find_near_residuals(spec, usual_cluster("gb200", 64))]
    assert found
    assert not any(model_facts(measurement.model).get("experts") for measurement in found)
    layouts = [
        (r.model, r.gpus, r.tp, r.pp, r.vpp, r.cp, r.ep, r.mbs, r.gbs, r.dtype) for r in found
    ]
    assert len(set(layouts)) == len(layouts)


def test_a_mixture_is_two_doublings_from_a_dense_model_of_its_degrees() -> None:
    spec = spec_from_model(load_model("gpt3-13b"), Parallelism(data=8), Batch(1, 8))
    found = [item.measurement for _, item in find_near_residuals(spec, usual_cluster("b200", 8))]
    assert not any(model_facts(measurement.model).get("experts") for measurement in found)


def test_degrees_of_cp_and_ep_are_a_distance() -> None:
    model, cluster = load_model("llama3-8b"), usual_cluster("h100", 8)
    plain = spec_from_model(model, Parallelism(data=8), Batch(1, 8))
    split = spec_from_model(model, Parallelism(data=2, context=4), Batch(1, 8))
    (distance, nearest), *_ = find_near_residuals(plain, cluster)
    assert distance == pytest.approx(0, abs=0.01)
    assert (nearest.measurement.cp or 1) == 1
    assert find_near_residuals(split, cluster)[0][1].measurement.cp == 2


def test_a_prediction_outside_its_interval_is_warned_of_unless_both_are_written_alike() -> None:
    ends = dict.fromkeys((0.80, 0.95), (-0.2, -0.1))
    slower = Uncertainty("H100", 10.0, similar=TimeInterval(60, ends))
    assert "took longer than was predicted: expect 11.1 s to 12.2 s in place of" in slower.warning
    near = replace(slower, similar=TimeInterval(60, dict.fromkeys(ends, (-0.2, -0.001))))
    assert not near.warning


def test_runs_that_wait_for_every_kernel_say_nothing_of_a_plan() -> None:
    """Lucie-7B on 8 to 256 A100 is nearest by all that is counted."""
    split = Parallelism(data=32, tensor=2)
    spec = spec_from_model(load_model("llama3-8b"), split, Batch(2, 256))
    found = [
        item.measurement.source for _, item in find_near_residuals(spec, usual_cluster("a100", 64))
    ]
    assert found
    assert not any("Lucie" in source for source in found)
