"""Ranks that share the cores of a machine, and times that are measured on them instead of computed from bytes."""

import math
from dataclasses import replace

import pytest

from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import ModelShape
from parakit.config.run import DeviceKind, RunSpec
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.planner.time.cluster import Calibration, Cluster
from parakit.planner.time.compute import product_seconds
from parakit.planner.time.iteration import iteration_seconds, pipeline_seconds
from parakit.planner.time.rates import compute_device_rates

SHAPE = ModelShape(4, 64, 4, 4, 16, 256, 64, 64)
MEASURED = Calibration(
    matmul=1.0,
    logit_seconds=2e-9,
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


def test_idle_pipeline_stage_frees_its_core_for_other_ranks() -> None:
    spec = run(Parallelism(pipeline=2), samples=4)
    slowest, through = pipeline_seconds(spec, on(2, 2))
    # With a single micro batch the stages work in turn and never need a second core.
    shared, way = pipeline_seconds(spec, on(2, 1))
    assert way == pytest.approx(through)
    assert shared.total <= 2 * slowest.total
    # With many micro batches both stages work all the time, on a single core.
    many = run(Parallelism(pipeline=2), samples=400)
    shared, _ = pipeline_seconds(many, on(2, 1))
    assert shared.total == pytest.approx(through)


def test_logits_take_the_measured_seconds_per_logit() -> None:
    dearer = replace(MEASURED, logit_seconds=8e-9)
    plain, slower = (
        iteration_seconds(run(Parallelism()), on(1, 2, measured)).memory_bound
        for measured in (MEASURED, dearer)
    )
    # Two micro batches of 4 x 64 tokens.
    assert slower - plain == pytest.approx(2 * 4 * 64 * 50304 * (8e-9 - 2e-9))


def test_optimizer_takes_the_measured_seconds_per_parameter_and_per_tensor() -> None:
    dearer = replace(MEASURED, tensor_seconds=1e-3)
    plain, slower = (
        iteration_seconds(run(Parallelism()), on(1, 2, measured)).optimizer
        for measured in (MEASURED, dearer)
    )
    # Twelve a layer, two tables and the last norm's two.
    assert slower - plain == pytest.approx((4 * 12 + 4) * 1e-3)


def test_each_micro_batch_adds_the_gradients_of_layers_and_tables() -> None:
    dearer = replace(MEASURED, gradient_seconds=1e-9)
    for samples, count in ((4, 1), (8, 2)):
        plain, added = (
            iteration_seconds(run(Parallelism(), samples=samples), on(1, 2, measured)).memory_bound
            for measured in (MEASURED, dearer)
        )
        # Twelve squares of the width in each of four layers; the table for its look-up and its logits.
        elements = 4 * 12 * 64**2 + 2 * 64 * 50304
        assert added - plain == pytest.approx(count * elements * 1e-9)


def test_each_sequential_expert_costs_a_launch() -> None:
    shape = replace(SHAPE, experts=8, experts_per_token=2, expert_ffn_hidden=32)
    dearer = replace(MEASURED, layer_launch_seconds=1e-3)
    launch_seconds = []
    for experts, split in (
        (8, Parallelism()),
        (16, Parallelism()),
        (16, Parallelism(data=2, expert=2)),
    ):
        spec = replace(run(split), shape=replace(shape, experts=experts))
        plain, launched = (
            iteration_seconds(spec, on(2, 2, measured)).host_launches / spec.microbatches
            for measured in (replace(MEASURED, layer_launch_seconds=0.0), dearer)
        )
        launch_seconds.append(launched - plain)
    eight, sixteen, halved = launch_seconds
    assert halved == pytest.approx(eight)
    assert sixteen > 1.4 * eight


def test_a_core_multiplies_few_rows_at_its_usual_rate() -> None:
    rate = compute_device_rates(on(1, 2), "fp32")
    sixteen_rows, many_rows = (product_seconds(rows, 512, 512, 0, rate) for rows in (16, 128))
    assert many_rows == pytest.approx(8 * sixteen_rows)


def test_ranks_wait_for_the_slowest_running_rank() -> None:
    spread = replace(MEASURED, jitter=0.1)
    two, four = (
        iteration_seconds(run(Parallelism(data=ranks), samples=8), on(ranks, 2, spread))
        for ranks in (2, 4)
    )
    for seconds in (two, four):
        steady = seconds.total - seconds.stragglers
        assert seconds.stragglers == pytest.approx(0.1 * math.sqrt(2 * math.log(2)) * steady)


def test_measured_latency_applies_per_collective() -> None:
    spec = run(Parallelism(tensor=2))
    dearer = replace(MEASURED, link_latency_seconds=2e-3)
    plain, slower = (
        iteration_seconds(spec, on(2, 2, measured)).tensor_parallel
        for measured in (MEASURED, dearer)
    )
    calls = (slower - plain) / 1e-3
    assert calls == pytest.approx(round(calls))


def test_gathered_weights_move_at_the_rate_of_a_gather() -> None:
    sharded = run(Parallelism(data=2, sharding=Sharding.ZERO1))
    slower = replace(MEASURED, link_latency_seconds=0.0, link=1.0)
    plain, gathered, scattered, both = (
        iteration_seconds(sharded, on(2, 2, measured)).gradient_sync
        for measured in (
            slower,
            replace(slower, all_gather_share=0.25),
            replace(slower, reduce_scatter_share=0.5),
            replace(slower, all_gather_share=0.25, reduce_scatter_share=0.5),
        )
    )
    assert plain < gathered < both
    # The reduce-scatter of gloo sends twice the bytes of an all-gather.
    assert gathered - plain == pytest.approx(plain, rel=0.02)
    assert scattered - plain == pytest.approx(2 * plain / 3, rel=0.02)


def test_cpu_ranks_and_local_layers_gather_only_keys_and_values() -> None:
    from parakit.planner.candidates import list_cp_comm_types

    split = Parallelism(context=2)
    spec = RunSpec(SHAPE, split, Batch(1, 4))
    for gathers in (replace(spec, device=DeviceKind.CPU), replace(spec, fused_norms=False)):
        assert list_cp_comm_types(gathers, split) == ("all_gather",)
    assert "p2p" in list_cp_comm_types(spec, split)
