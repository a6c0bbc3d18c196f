"""Ranks that share a machine's cores, and what is measured of them in place of counting bytes."""

from dataclasses import replace

import pytest

from tools.plan.time.cluster import Calibration, Cluster
from tools.plan.time.iteration import iteration_seconds, pipeline_seconds
from tools.spec.hardware import device_by_key, link_by_key
from tools.spec.model import ModelShape
from tools.spec.run import DeviceKind, RunSpec
from tools.spec.strategy import Batch, Parallelism

SHAPE = ModelShape(4, 64, 4, 4, 16, 256, 64, 64)
MEASURED = Calibration(
    matmul=1.0,
    logit_seconds=2e-9,
    large_logit_seconds=8e-9,
    parameter_seconds=5e-9,
    contention=1.0,
    launch_beside_work=False,
    link_latency_seconds=1e-3,
)


def on(ranks: int, cores: int, measured: Calibration = MEASURED) -> Cluster:
    link = link_by_key("gloo")
    return Cluster(device_by_key("cpu"), ranks, ranks, link, link, measured, cores=cores)


def run(split: Parallelism, micro: int = 4, samples: int = 8) -> RunSpec:
    spec = RunSpec(SHAPE, split, Batch(micro, samples), dtype="fp32", dropout=0.0)
    return replace(spec, fused_attention=False, device=DeviceKind.CPU)


def test_four_ranks_on_two_cores_compute_at_half_the_rate() -> None:
    spec = run(Parallelism(data=4), samples=16)
    alone, shared = (iteration_seconds(spec, on(4, cores)) for cores in (4, 2))
    for part in ("matmul", "attention", "memory_bound", "optimizer"):
        assert getattr(shared, part) == pytest.approx(2 * getattr(alone, part), rel=0.1), part
    assert shared.gradient_sync == alone.gradient_sync


def test_a_waiting_stage_leaves_its_core_to_the_others() -> None:
    spec = run(Parallelism(pipeline=2), samples=4)
    slowest, through = pipeline_seconds(spec, on(2, 2))
    # One micro batch: the stages work one after the other, and never need a second core.
    shared, way = pipeline_seconds(spec, on(2, 1))
    assert way == pytest.approx(through)
    assert shared.total <= 2 * slowest.total
    # Many: both work all the time, on one core.
    many = run(Parallelism(pipeline=2), samples=400)
    shared, _ = pipeline_seconds(many, on(2, 1))
    assert shared.total == pytest.approx(through)


def test_logits_beyond_the_heap_cost_what_new_pages_cost() -> None:
    # 128 and 256 tokens times 50,304 words in fp32: 24.6 and 49.1 MiB.
    small, large = (
        iteration_seconds(run(Parallelism(), micro), on(1, 2)).memory_bound for micro in (2, 4)
    )
    assert large - small == pytest.approx(8 * 64 * 50304 * (8e-9 - 2e-9), rel=0.05)


def test_an_update_takes_what_was_measured_a_parameter_and_a_tensor() -> None:
    dearer = replace(MEASURED, tensor_seconds=1e-3)
    plain, each = (
        iteration_seconds(run(Parallelism()), on(1, 2, measured)).optimizer
        for measured in (MEASURED, dearer)
    )
    # Twelve a layer, two tables and the last norm's two.
    assert each - plain == pytest.approx((4 * 12 + 4) * 1e-3)


def test_a_measured_latency_is_that_of_a_whole_call() -> None:
    spec = run(Parallelism(tensor=2))
    dearer = replace(MEASURED, link_latency_seconds=2e-3)
    one, other = (
        iteration_seconds(spec, on(2, 2, measured)).tensor_parallel
        for measured in (MEASURED, dearer)
    )
    calls = (other - one) / 1e-3
    assert calls == pytest.approx(round(calls))


def test_cpu_ranks_gather_keys_and_values_alone() -> None:
    from tools.plan.candidates import comm_types

    split = Parallelism(context=2)
    assert comm_types(SHAPE, split, DeviceKind.CPU) == ("all_gather",)
    assert "p2p" in comm_types(SHAPE, split)
