"""Time of the host: it launches ahead of the device, which waits only where the host is slower."""

from dataclasses import replace

import pytest

from parakit.config.experts import ExpertLoad
from parakit.config.model import load_model
from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec, TokenDispatcher
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.planner.readings.published import usual_cluster
from parakit.planner.time.cluster import Calibration, Cluster
from parakit.planner.time.execution import Execution
from parakit.planner.time.host import (
    context_launch_seconds,
    iteration_host_seconds,
    launch_seconds,
    micro_batch_host_seconds,
    split_launch_seconds,
    unhidden_launch_seconds,
)
from parakit.planner.time.iteration import _exposed_sync_seconds, iteration_seconds

SHAPE = load_model("gpt2-large").shape
LAYER = 0.003


def on(devices: int = 8, layer_seconds: float = LAYER, **execution: bool) -> Cluster:
    """Return a cluster of H100 whose host needs `layer_seconds` per layer, and nothing per collective call."""
    constants = Calibration(layer_launch_seconds=layer_seconds, call_launch_seconds=0.0, jitter=0.0)
    return replace(
        usual_cluster("h100", devices), calibration=constants, execution=Execution(**execution)
    )


def run(split: Parallelism, micro: int = 1, micro_batches: int = 1) -> RunSpec:
    return RunSpec(SHAPE, split, Batch(micro, micro * micro_batches * split.data), dropout=0.0)


def test_a_fast_host_costs_only_its_training_loop() -> None:
    seconds = iteration_seconds(run(Parallelism(), micro=32), on(1, layer_seconds=1e-4))
    assert seconds.host_launches == pytest.approx(5.9e-4)


def test_a_slow_host_decides_the_time_of_both_passes() -> None:
    spec = run(Parallelism())
    seconds = iteration_seconds(spec, on(1, layer_seconds=0.1))
    # 36 layers, two layers' times for the rest of a micro batch, 5.9 for the loop, and the update's 0.14 per layer.
    layers = 36 + 2 + 5.9 + 0.14 * 36
    assert seconds.total == pytest.approx(layers * 0.1)


def test_steps_bound_by_the_host_take_as_long_at_every_tensor_parallel_size() -> None:
    times = [iteration_seconds(run(Parallelism(tensor=n)), on(n)).total for n in (1, 2, 4, 8)]
    assert max(times) < 1.02 * min(times)


def test_forward_alone_waits_for_a_host_that_is_slower_in_forward_alone() -> None:
    spec = run(Parallelism(), micro=8)
    device = iteration_seconds(spec, on(1, layer_seconds=1e-6))
    computing = device.matmul + device.attention + device.memory_bound
    # 0.4 of the host's time is forward and a third of the device's, so here the host is slower in forward alone.
    layer_seconds = 0.9 * computing / (36 + 2)
    waiting = iteration_seconds(spec, on(1, layer_seconds)).host_launches - 5.9 * layer_seconds
    assert 0 < waiting < 0.1 * computing


def test_recomputation_launches_forward_kernels_in_backward() -> None:
    plain = run(Parallelism())
    recomputed = replace(plain, recompute=Recompute.FULL)
    once, twice = (launch_seconds(spec, on(1), ()) for spec in (plain, recomputed))
    assert twice == pytest.approx(4 / 3 * once)
    assert split_launch_seconds(recomputed, twice).forward == pytest.approx(0.4 * once)


def test_experts_expose_a_part_of_their_launches_unless_padded() -> None:
    shape = load_model("mixtral-8x7b").shape
    spec = RunSpec(shape, Parallelism(data=8, expert=8), Batch(1, 8), dropout=0.0)
    padded = replace(spec, expert_load=ExpertLoad(capacity=1.0, pads_to_capacity=True))
    assert unhidden_launch_seconds(spec, on(), 10.0, 0.0) == 2.0
    assert unhidden_launch_seconds(padded, on(), 10.0, 0.0) == 0
    assert unhidden_launch_seconds(padded, on(blocking=True), 10.0, 0.0) == 10.0


def test_the_first_all_to_all_of_a_layer_runs_while_the_host_launches_after_its_wait() -> None:
    shape = load_model("mixtral-8x7b").shape
    spec = RunSpec(shape, Parallelism(data=8, expert=8), Batch(1, 8), dropout=0.0)
    # One of four exchanges is the first of forward, and two of six with recomputed experts.
    assert unhidden_launch_seconds(spec, on(), 10.0, expert_seconds=6.0) == 2.0 - 6.0 / 4
    recomputed = replace(spec, recompute=Recompute.FULL)
    assert unhidden_launch_seconds(recomputed, on(), 10.0, expert_seconds=3.0) == 2.0 - 3.0 / 3
    assert unhidden_launch_seconds(spec, on(), 10.0, expert_seconds=100.0) == 0
    deep_ep = replace(spec, token_dispatcher=TokenDispatcher.DEEP_EP)
    assert unhidden_launch_seconds(deep_ep, on(), 10.0, expert_seconds=6.0) == 2.0


def test_1f1b_waits_for_each_exchange_and_the_interleaved_schedule_does_not() -> None:
    outside_layers = {
        (pipeline, virtual): micro_batch_host_seconds(
            run(Parallelism(pipeline=pipeline, virtual_stages=virtual)), on()
        )
        for pipeline, virtual in ((1, 1), (4, 1), (4, 3))
    }
    layers = {
        key: (seconds.forward + seconds.backward) / LAYER for key, seconds in outside_layers.items()
    }
    assert layers == pytest.approx({(1, 1): 2.0, (4, 1): 4.0, (4, 3): 3.5})
    graphs = micro_batch_host_seconds(run(Parallelism(pipeline=4)), on(graphs=True))
    assert (graphs.forward, graphs.backward) == (0, 0)


def test_each_step_of_the_context_ring_is_launched() -> None:
    def layers(context: int, comm_type: str) -> float:
        spec = replace(run(Parallelism(context=context)), cp_comm_type=comm_type)
        return context_launch_seconds(spec, on()) / LAYER

    assert [layers(n, "p2p") for n in (1, 2, 8)] == pytest.approx([0, 0.25, 1.75])
    assert layers(8, "a2a") == layers(8, "all_gather") == pytest.approx(0.8)


def test_the_update_is_launched_while_the_optimizer_runs() -> None:
    spec = run(Parallelism())
    loop, update = 5.9 * LAYER, 0.14 * 36 * LAYER
    assert iteration_host_seconds(spec, on(1), 0.0) == pytest.approx(loop + update)
    assert iteration_host_seconds(spec, on(1), 1.0) == pytest.approx(loop)
    assert iteration_host_seconds(spec, on(1, graphs=True), 0.0) == pytest.approx(update)


def test_a_profiled_layer_hides_no_launches_of_other_layers() -> None:
    spec = run(Parallelism(), micro=2)
    trained, profiled = (
        iteration_seconds(spec, on(1, summed_profiles=way)) for way in (False, True)
    )
    # The output layer keeps the device busy while the host launches other layers, but not in a sum of profiles.
    assert profiled.host_launches > trained.host_launches


def test_reductions_of_virtual_stages_hide_behind_the_backward_of_earlier_ones() -> None:
    cluster = on()
    contention = cluster.constants.contention

    def exposed(virtual: int, seconds: float) -> float:
        split = Parallelism(pipeline=4, data=2, virtual_stages=virtual, sharding=Sharding.ZERO1)
        return _exposed_sync_seconds(run(split), cluster, seconds, 0.1, pass_seconds=1.0)

    # One micro batch's backward hides nine tenths of a second; a bucket is exposed.
    assert exposed(1, 1.0) == pytest.approx(0.1 + 0.9 * contention)
    # Four micro batches' backward through the other two of three virtual stages hide their reductions.
    assert exposed(3, 3.0) == pytest.approx(1.0 + 2.0 * contention)
    hidden = 4 * 2 / 3
    assert exposed(3, 6.0) == pytest.approx(2.0 + (4.0 - hidden) + hidden * contention)
