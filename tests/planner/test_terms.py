"""Each term of the iteration time follows its documented source."""

from dataclasses import asdict, replace

import pytest

from parakit.config.experts import BALANCED, ExpertLoad
from parakit.config.groups import Group
from parakit.config.hardware import load_hardware
from parakit.config.model import LatentAttention, load_model
from parakit.config.recompute import Recompute
from parakit.config.run import Fp8Recipe, RunSpec
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.costs.collectives.call import CollectiveCall
from parakit.costs.operations import Operation, Phase
from parakit.costs.tensors import rank_parameters
from parakit.planner.readings.published import usual_cluster
from parakit.planner.time.cluster import Cluster, find_route
from parakit.planner.time.compute import layer_seconds, product_seconds
from parakit.planner.time.constants import load_constants
from parakit.planner.time.execution import Execution
from parakit.planner.time.host import launch_seconds
from parakit.planner.time.iteration import IterationSeconds, _find_slowest_update, iteration_seconds
from parakit.planner.time.rates import compute_device_rates
from parakit.planner.time.traffic import layer_bytes, softmax_is_fused
from tests.planner.readings.fit import BOUNDS, FITTED, start_of

SHAPE = load_model("gpt3-13b").shape


def on(devices: int = 8, **execution: object) -> Cluster:
    return replace(usual_cluster("h100", devices), execution=Execution(**execution))  # type: ignore[arg-type]


def seconds(split: Parallelism, cluster: Cluster, batch: Batch | None = None) -> IterationSeconds:
    batch = batch or Batch(1, 8 * split.data)
    return iteration_seconds(RunSpec(SHAPE, split, batch, dropout=0.0), cluster)


def test_partial_wave_of_tiles_takes_as_long_as_a_full_wave() -> None:
    rate = replace(compute_device_rates(on(), "bf16"), bytes_per_second=1e30, fill=0.0)
    # 256 x 128 is the best tile and 132 processors compute one each.
    whole, one_more = (product_seconds(256 * 132, 65536, 128 * n, 2, rate) for n in (1, 2))
    assert one_more == pytest.approx(2 * whole, rel=0.01)
    assert product_seconds(256 * 133, 65536, 128, 2, rate) > 1.2 * whole


def test_few_tiles_with_a_long_inner_dimension_are_split_along_it() -> None:
    rate = compute_device_rates(on(), "bf16")
    few = product_seconds(1280, 32768, 1280, 2, rate)
    one_wave = 2 * 256 * 128 * 132 * (32768 + rate.fill) / rate.flops
    assert few < 0.75 * one_wave


def test_product_takes_the_longer_of_arithmetic_and_memory_time() -> None:
    rate = compute_device_rates(on(), "bf16")
    thin = product_seconds(8192, 128, 8192, 2, rate)
    operands = 2 * (2 * 8192 * 128 + 8192 * 8192) / rate.bytes_per_second
    assert thin == pytest.approx(operands, rel=0.1)
    added = product_seconds(8192, 128, 8192, 2, rate, accumulated=True)
    assert added > 3 * thin


def test_a_products_rate_falls_with_its_inner_dimension() -> None:
    rate = replace(compute_device_rates(on(), "bf16"), bytes_per_second=1e30)
    short, long = (product_seconds(256 * 132, k, 128 * 256, 2, rate) / k for k in (512, 8192))
    expected = (1 + rate.fill / 512) / (1 + rate.fill / 8192)
    assert short / long == pytest.approx(expected, rel=0.01)


def test_one_kernel_of_many_small_products_fills_the_device() -> None:
    rate = compute_device_rates(on(), "bf16")
    apart = 66 * product_seconds(256, 4096, 128, 2, rate)
    assert product_seconds(256, 4096, 128, 2, rate, copies=66) < apart / 4


def test_fewer_bits_need_less_time_for_products_and_casts_are_not_free() -> None:
    spec = RunSpec(SHAPE, Parallelism(), Batch(1, 8), dropout=0.0)
    plain, fewer = (
        iteration_seconds(replace(spec, fp8_recipe=kind), on(1))
        for kind in (Fp8Recipe.NONE, Fp8Recipe.TENSORWISE)
    )
    assert fewer.matmul < 0.75 * plain.matmul
    assert fewer.memory_bound > plain.memory_bound
    assert fewer.attention == plain.attention


def test_cuda_graphs_remove_the_launch_time() -> None:
    tiny = RunSpec(load_model("gpt2-tiny").shape, Parallelism(), Batch(1, 8), "bf16")
    eager, graphs = (iteration_seconds(tiny, on(1, graphs=on_)) for on_ in (False, True))
    assert eager.host_launches > 50 * graphs.host_launches
    assert eager.memory_bound == graphs.memory_bound


def test_overlapped_gradients_and_weights_expose_a_bucket_and_contention() -> None:
    split = Parallelism(data=64, sharding=Sharding.ZERO1)
    after = seconds(split, on(64))
    beside = seconds(split, on(64, overlap_gradients=True, overlap_parameters=True))
    assert 0 < beside.gradient_sync < 0.7 * after.gradient_sync


def test_a_bucket_grows_with_all_ranks_that_reduce_it() -> None:
    splits = [
        Parallelism(data=d, context=c, sharding=Sharding.ZERO1) for d, c in ((256, 1), (32, 8))
    ]
    specs = [RunSpec(SHAPE, split, Batch(1, split.data), dropout=0.0) for split in splits]
    shares = {_find_slowest_update(spec, on(256))[0] for spec in specs}
    assert shares == {256_000_000 / rank_parameters(specs[0]).total}


def test_user_buffers_overlap_tensor_parallel_collectives() -> None:
    split = Parallelism(tensor=8, sequence_parallel=True)
    waited, hidden = (seconds(split, on(8, overlap_tensor=way)) for way in (False, True))
    assert hidden.tensor_parallel < 0.7 * waited.tensor_parallel


def test_scatter_gather_sends_shards_of_pipeline_messages() -> None:
    split = Parallelism(tensor=8, pipeline=2)
    whole, shares = (seconds(split, on(16, scatter_gather=way)) for way in (False, True))
    assert shares.pipeline_messages == pytest.approx(whole.pipeline_messages / 8)


def test_expert_imbalance_costs_compute_and_communication_only_with_expert_parallelism() -> None:
    mixtral = load_model("mixtral-8x7b").shape
    cluster = on(8)

    def timed(expert: int, load: ExpertLoad) -> IterationSeconds:
        split = Parallelism(data=8, expert=expert)
        spec = RunSpec(mixtral, split, Batch(1, 8), dropout=0.0, expert_load=load)
        return iteration_seconds(spec, cluster)

    even, busy = timed(8, ExpertLoad()), timed(8, ExpertLoad(2.0))
    assert 1.9 < busy.expert_parallel / even.expert_parallel <= 2.0
    assert 1.6 < busy.matmul / even.matmul < 2.0
    assert busy.attention == even.attention
    assert timed(1, ExpertLoad(2.0)) == timed(1, ExpertLoad())


def test_oversubscribed_switch_slows_only_collectives_between_nodes() -> None:
    plain, shared = (replace(on(64), oversubscription=factor) for factor in (1.0, 4.0))
    split = Parallelism(tensor=8, data=4, pipeline=2, sequence_parallel=True)
    assert find_route(shared, split, Group.TENSOR) == find_route(plain, split, Group.TENSOR)
    for group in (Group.DATA_CONTEXT, Group.PIPELINE):
        ways = [find_route(cluster, split, group) for cluster in (plain, shared)]
        assert ways[1] == replace(
            ways[0],
            bytes_per_second=ways[0].bytes_per_second / 4,
            pairwise_bytes_per_second=ways[0].pairwise_bytes_per_second / 4,
        )
    assert seconds(split, shared).gradient_sync > 3 * seconds(split, plain).gradient_sync
    assert seconds(split, shared).tensor_parallel == seconds(split, plain).tensor_parallel


def test_collective_of_more_ranks_waits_longer_for_hosts_unless_launched_by_graphs() -> None:
    spec = RunSpec(SHAPE, Parallelism(), Batch(1, 1), dropout=0.0)
    calls = {
        ranks: CollectiveCall(
            Group.TENSOR, ranks, Operation.ALL_REDUCE, Phase.FORWARD, "", 4, 1024, ""
        )
        for ranks in (1, 2, 4, 16)
    }
    host = {n: launch_seconds(spec, on(), [call]) for n, call in calls.items()}
    a_call = on().constants.call_launch_seconds
    assert host[1] == pytest.approx(on().constants.layer_launch_seconds)
    assert host[2] - host[1] == pytest.approx(4 * a_call)
    assert host[16] - host[1] == pytest.approx(8 * a_call)
    assert launch_seconds(spec, on(graphs=True), [calls[16]]) == 0


@pytest.mark.parametrize(
    ("tensor", "samples", "fused"), [(1, 1, True), (8, 1, False), (8, 2, True), (16, 2, False)]
)
def test_unfused_attention_uses_the_fused_softmax_for_row_counts_divisible_by_four(
    tensor: int, samples: int, fused: bool
) -> None:
    shape = replace(load_model("gpt2-large").shape, heads=16, query_groups=16)
    spec = RunSpec(
        shape, Parallelism(tensor=tensor), Batch(samples, samples), "fp16", fused_attention=False
    )
    assert softmax_is_fused(spec) is fused
    assert not softmax_is_fused(replace(spec, shape=replace(shape, seq_length=8192)))
    assert softmax_is_fused(replace(spec, fused_attention=True))


@pytest.mark.parametrize(
    ("modules", "products", "attention"),
    [
        ("none", 0, 0),
        ("core_attn", 0, 1),
        # The MLP's two products have 8 h^2 of the 12 h^2 weights of a layer.
        ("mlp", 8 / 12, 0),
        ("full", 1, 1),
        ("layernorm", 0, 0),
    ],
)
def test_selective_recomputation_repeats_the_listed_modules(
    modules: str, products: float, attention: float
) -> None:
    spec = RunSpec(
        SHAPE, Parallelism(), Batch(1, 1), dropout=0.0, recompute=Recompute.parse(modules)
    )
    layer = layer_seconds(spec, compute_device_rates(on(), "bf16"))
    assert layer.matmul_recompute == pytest.approx(products * layer.forward_matmul, rel=0.02)
    assert layer.attention_recompute == attention * layer.forward_attention
    assert (layer.memory_recompute == layer.forward_memory) is (modules == "full")


def test_unfused_norms_add_memory_passes() -> None:
    spec = RunSpec(
        SHAPE, Parallelism(), Batch(1, 1), dropout=0.0, recompute=Recompute.parse("layernorm")
    )
    rate = compute_device_rates(on(), "bf16")
    assert layer_bytes(spec, rate).recompute == 0
    alone = layer_bytes(replace(spec, fused_norms=False), rate)
    norms = 2 * 2 * 2 * SHAPE.hidden * SHAPE.seq_length
    assert alone.recompute == pytest.approx(norms * rate.elementwise)


def test_recomputed_experts_repeat_their_all_to_all() -> None:
    shape = load_model("mixtral-8x7b").shape
    spec = RunSpec(shape, Parallelism(data=8, expert=8), Batch(1, 8), dropout=0.0)
    kept, again = (
        iteration_seconds(replace(spec, recompute=Recompute.parse(modules)), on())
        for modules in ("none", "moe")
    )
    assert again.expert_parallel == pytest.approx(1.5 * kept.expert_parallel, rel=0.05)
    assert again.attention == kept.attention
    assert again.matmul > 1.2 * kept.matmul


def test_unfused_softmax_costs_launches_and_memory_traffic() -> None:
    shape = replace(SHAPE, heads=40, query_groups=40)
    split = Parallelism(tensor=8)
    small, large = (
        RunSpec(shape, split, Batch(samples, samples), "bf16", fused_attention=False)
        for samples in (1, 4)
    )
    assert launch_seconds(small, on(), []) > 1.1 * launch_seconds(large, on(), [])
    attention = [iteration_seconds(spec, on()).attention for spec in (small, large)]
    assert attention[0] > attention[1] / 2


def attention(device: str, width: int, **changes: object) -> float:
    shape = replace(SHAPE, heads=16, query_groups=16, head_width=width, **changes)  # type: ignore[arg-type]
    spec = RunSpec(shape, Parallelism(), Batch(1, 1), dropout=0.0)
    rate = compute_device_rates(usual_cluster(device, 1), "bf16")
    return layer_seconds(spec, rate).forward_attention


def test_attention_of_head_size_192_is_slower_on_blackwell() -> None:
    for device, share in (("h100", 1.0), ("b200", 0.35)):
        assert attention(device, 192) == pytest.approx(1.5 * attention(device, 128) / share)
    assert attention("b200", 256) == pytest.approx(2 * attention("b200", 128))
    keys_of_192 = LatentAttention(1536, 512, 128, 64, 128)
    values_of_192 = LatentAttention(1536, 512, 128, 64, 192)
    taken, not_taken = (
        attention("b200", 128, latent=latent) for latent in (keys_of_192, values_of_192)
    )
    assert not_taken == pytest.approx(taken * (192 + 192) / (192 + 128) / 0.35)


def test_unfused_activation_adds_nine_memory_passes() -> None:
    spec = RunSpec(SHAPE, Parallelism(tensor=2), Batch(1, 1), "bf16", dropout=0.0)
    (forward, backward, _), (more_forward, more_backward, _) = (
        layer_bytes(spec, compute_device_rates(on(2, eager_activation=way), "bf16"))
        for way in (False, True)
    )
    a_pass = 2 * SHAPE.seq_length * SHAPE.ffn_hidden // 2
    assert (more_forward - forward, more_backward - backward) == (2 * a_pass, 7 * a_pass)


def test_a_fused_loss_moves_fewer_bytes() -> None:
    spec = RunSpec(SHAPE, Parallelism(), Batch(1, 8), dropout=0.0)
    plain, fused = (
        iteration_seconds(replace(spec, fused_loss=way), on(1)).memory_bound
        for way in (False, True)
    )
    assert fused < plain


def test_more_devices_wait_longer_for_their_slowest() -> None:
    few, many = (seconds(Parallelism(data=n), on(n)).stragglers for n in (8, 1024))
    assert 0 < few < many


def test_calls_of_more_ranks_have_more_steps_and_trees_bound_them() -> None:
    two, eight, far = (
        find_route(on(64), Parallelism(data=64 // n, tensor=n), Group.TENSOR) for n in (2, 8, 32)
    )
    assert two.ring_seconds < eight.ring_seconds
    assert far.tree_seconds < far.ring_seconds


def of_experts(load: ExpertLoad = BALANCED, **execution: bool) -> IterationSeconds:
    shape, split = load_model("mixtral-8x7b").shape, Parallelism(data=8, expert=8)
    spec = RunSpec(shape, split, Batch(1, 64), dropout=0.0, expert_load=load)
    no_waits = replace(on().calibration, call_launch_seconds=0.0)
    return iteration_seconds(spec, replace(on(**execution), calibration=no_waits))


def test_overlapped_expert_communication_costs_only_contention() -> None:
    alone, beside = of_experts(), of_experts(overlap_experts=True)
    share = on().constants.contention
    assert beside.expert_parallel == pytest.approx(share * alone.expert_parallel)
    assert beside.matmul == alone.matmul


def test_partial_cuda_graphs_leave_only_expert_launches_to_the_host() -> None:
    shape = load_model("mixtral-8x7b").shape
    spec = RunSpec(shape, Parallelism(data=8, expert=8), Batch(1, 64), dropout=0.0)
    none, part, full = (
        launch_seconds(spec, on(**way), ()) for way in ({}, {"captured": True}, {"graphs": True})
    )
    # One expert per rank: 2.5 layers' kernels and its own 0.04, of which the graphs launch two layers'.
    assert part / none == pytest.approx(0.54 / 2.54)
    assert full == 0


def test_padded_expert_load_lets_the_host_launch_ahead() -> None:
    padded = ExpertLoad(capacity=1.0, pads_to_capacity=True)
    # A layer keeps the device busy for longer than the host needs to launch it, so only the routing costs time.
    assert of_experts().host_launches > 3 * of_experts(load=padded).host_launches


def test_blocking_launches_add_the_time_of_the_host() -> None:
    split = Parallelism(tensor=2)
    plain, blocked = (seconds(split, on(2, blocking=way)) for way in (False, True))
    launches = SHAPE.layers * 8 * launch_seconds(RunSpec(SHAPE, split, Batch(1, 8)), on(2), ())
    assert blocked.host_launches - plain.host_launches > 0.99 * launches


def test_received_tokens_are_sorted_by_expert_at_a_cost() -> None:
    shape = replace(load_model("mixtral-8x7b").shape, layers=1)
    rate = compute_device_rates(on(), "bf16")
    moved = 4096 * shape.experts_per_token * shape.hidden * 2

    def more(expert: int, **changes: object) -> int:
        spec = RunSpec(shape, Parallelism(data=8, expert=expert), Batch(1, 8), "bf16", dropout=0.0)
        spec = replace(spec, shape=replace(shape, seq_length=4096, **changes))  # type: ignore[arg-type]
        return (
            layer_bytes(spec, rate)[0]
            - layer_bytes(spec, replace(rate, execution=Execution(deduplicated=True)))[0]
        )

    assert (more(8), more(4)) == (0, 4 * moved)


def bytes_of_experts(execution: Execution, **changes: object) -> tuple[int, int]:
    """Return bytes moved forward and backward for 1,024 tokens that each go to two of eight experts."""
    shape = replace(load_model("mixtral-8x7b").shape, seq_length=1024)
    shape = replace(shape, **changes)  # type: ignore[arg-type]
    spec = RunSpec(shape, Parallelism(data=8, expert=8), Batch(1, 8), "bf16", dropout=0.0)
    return layer_bytes(spec, replace(compute_device_rates(on(), "bf16"), execution=execution))[:2]


@pytest.mark.parametrize(
    ("execution", "passes"),
    [
        (Execution(), (6, 8)),
        (Execution(wide_probabilities=True), (14, 20)),
        (Execution(deduplicated=True), (14, 20)),
        (Execution(fused_experts=True), (0, 0)),
    ],
)
def test_expert_bias_adds_memory_passes_unless_fused(
    execution: Execution, passes: tuple[int, int]
) -> None:
    # Queries, keys and values have one too: 6,144 columns, whose gradient is summed.
    plain, biased = (bytes_of_experts(execution, bias=way) for way in (False, True))
    copies, projected = 1024 * 2 * 4096 * 2, 1024 * 6144 * 2
    assert biased[0] - plain[0] == passes[0] * copies
    summed = projected + 2 * 2 * 1024 * 4096
    activated = 0 if execution.fused_experts else 2 * 1024 * 2 * 14336 * 2
    assert biased[1] - plain[1] == passes[1] * copies + summed + activated


def test_clamped_activations_add_memory_passes_that_recomputation_repeats() -> None:
    columns = 1024 * 2 * 14336 * 2
    plain, clamped = (
        bytes_of_experts(Execution(), clamps_activations=way) for way in (False, True)
    )
    assert (clamped[0] - plain[0], clamped[1] - plain[1]) == (8 * columns, 15 * columns)
    shape = replace(load_model("mixtral-8x7b").shape, seq_length=1024)
    again = RunSpec(shape, Parallelism(data=8, expert=8), Batch(1, 8), "bf16", dropout=0.0)
    again = replace(again, recompute=Recompute(frozenset({"moe_act"})))
    rate = compute_device_rates(on(), "bf16")
    repeated = [
        layer_bytes(replace(again, shape=replace(shape, clamps_activations=way)), rate).recompute
        for way in (False, True)
    ]
    assert repeated[1] - repeated[0] == 8 * columns


def test_sliding_window_shortens_attention_of_its_layers() -> None:
    rate = compute_device_rates(on(1), "bf16")

    def taken(window: int, share: float) -> float:
        shape = replace(SHAPE, seq_length=4096, window=window, windowed_fraction=share)
        return layer_seconds(
            RunSpec(shape, Parallelism(), Batch(1, 1), "bf16"), rate
        ).forward_attention

    whole, every = taken(0, 0.0), taken(129, 1.0)
    # A window has 129 - 129 * 128 / 8,192 tokens on average, of 2,048; a fixed cost equals 720 keys.
    kept = (2 * (129 - 129 * 128 / 8192) + 720) / (4096 + 720)
    assert every / whole == pytest.approx(kept)
    assert taken(129, 0.5) == pytest.approx((whole + every) / 2)
    assert taken(4096, 1.0) == whole


def test_delayed_fp8_scaling_saves_a_pass_over_each_operand() -> None:
    spec = RunSpec(SHAPE, Parallelism(), Batch(1, 1), "bf16", dropout=0.0)

    def moved(kind: Fp8Recipe) -> float:
        rate = compute_device_rates(on(1), "bf16", kind)
        times = layer_seconds(replace(spec, fp8_recipe=kind), rate)
        return times.backward_memory * rate.bytes_per_second

    gradients = SHAPE.seq_length * (4 + 1 + 4 + 1) * SHAPE.hidden - SHAPE.seq_length * SHAPE.hidden
    more = moved(Fp8Recipe.TENSORWISE) - moved(Fp8Recipe.DELAYED)
    assert more == pytest.approx(2 * gradients, rel=1e-6)


def test_gathering_fp8_weights_moves_half_the_bytes_of_bf16_weights() -> None:
    split = Parallelism(data=64, sharding=Sharding.ZERO1)
    spec = RunSpec(SHAPE, split, Batch(1, 64), "bf16", dropout=0.0, fp8_recipe=Fp8Recipe.MXFP8)
    cluster = replace(usual_cluster("b200", 64), execution=Execution())
    halved = replace(spec, quantised_weights=True)
    whole, less = (
        iteration_seconds(run_spec, cluster).gradient_sync for run_spec in (spec, halved)
    )
    # Weights are 2 of the 6 bytes that are moved; the scales of an MXFP8 weight add 3%.
    assert less / whole == pytest.approx((4 + 1.03) / 6, rel=0.01)


def test_broadcast_of_weights_costs_a_ring_pass_per_tensor() -> None:
    split = Parallelism(data=16, sharding=Sharding.ZERO1)
    gathered, sent = (
        seconds(split, on(16, broadcast_parameters=way)).gradient_sync for way in (False, True)
    )
    ring = find_route(on(16), split, Group.DATA_CONTEXT).ring_seconds
    assert sent - gathered == pytest.approx(16 * (ring + 5e-6), rel=1e-6)


@pytest.mark.parametrize("generation", FITTED)
def test_every_constant_lies_within_its_physical_bounds(generation: str) -> None:
    for constants in (load_constants(generation), start_of(generation)):
        for name, value in asdict(constants).items():
            low, high = BOUNDS[name]
            assert low <= value <= max(high, 0.95), name


def test_every_device_has_constants() -> None:
    assert all(load_constants(device.generation) for device in load_hardware().devices.values())


def test_leaving_out_a_source_changes_the_constants_only_if_the_source_is_known() -> None:
    assert load_constants("ampere", "VIA-Research/vTrain multi-node") != load_constants("ampere")
    assert load_constants("ampere", "nobody") == load_constants("ampere")
