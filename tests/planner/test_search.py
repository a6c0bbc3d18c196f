from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest

from parakit.config.model import ModelShape
from parakit.config.recompute import Recompute
from parakit.config.run import Fp8Recipe, RunSpec
from parakit.config.stages import EVEN_SPLIT, StageSplit, choose_stage_split
from parakit.config.strategy import Batch, Parallelism, Sharding, parse_strategy, strategy_name
from parakit.costs.constraints import divisors, find_violations
from parakit.costs.memory import find_peak_rank
from parakit.planner.advice import runner_up_sentence
from parakit.planner.candidates import (
    build_unsharded_spec,
    enumerate_splits,
    enumerate_variants,
    list_cp_comm_types,
    list_micro_batch_sizes,
    list_recomputes,
    list_virtual_stages,
)
from parakit.planner.search import (
    LEAST_SAMPLE_TIME_RATIO,
    Plan,
    Request,
    compare_with_fewest_devices,
    estimate_training_days,
    evaluate_closed_form,
    evaluate_configuration,
    evaluate_single_axis_strategies,
    find_devices_needed,
    search_configurations,
    select_pareto_frontier,
)
from parakit.planner.show import make_command, trained_vocabulary_sentence
from parakit.planner.ties import TIE_RATIO
from parakit.planner.time.iteration import pipeline_seconds
from parakit.planner.verdict import Fit

MakeRequest = Callable[..., Request]


def every_legal_configuration(request: Request) -> Iterator[RunSpec]:
    """Yield every legal configuration by asking `find_violations` of all degrees, without pruning."""
    devices, batch = request.cluster.devices, request.global_batch
    degrees = divisors(devices)
    for tensor, context, pipeline in product(degrees, repeat=3):
        data, remainder = divmod(devices, tensor * context * pipeline)
        if remainder:
            continue
        for sequence, size, kind in product(
            (False, True), divisors(batch), ("p2p", "all_gather", "a2a")
        ):
            if (sequence and tensor == 1) or (kind != "p2p" and context == 1):
                continue
            plain = Parallelism(data, tensor, pipeline, context, sequence_parallel=sequence)
            layers = request.template.shape.layers
            stages = choose_stage_split(layers, pipeline) or EVEN_SPLIT
            # A model without pipeline stages has no virtual ones: the second number is refused.
            most_virtual = -(-(layers + 2) // pipeline) if pipeline > 1 else 2
            for virtual, sharding in product(range(1, most_virtual + 1), tuple(Sharding)[:4]):
                if sharding and data * context == 1:
                    continue
                for recompute in (Recompute.NONE, Recompute.FULL):
                    spec = replace(
                        request.template,
                        parallelism=replace(plain, virtual_stages=virtual, sharding=sharding),
                        batch=Batch(size, batch),
                        recompute=recompute,
                        cp_comm_type=kind,
                        stages=stages,
                    )
                    if not find_violations(spec):
                        yield spec


@pytest.mark.parametrize(
    ("devices", "batch", "gpu", "layers"),
    [(2, 6, "h200", 36), (4, 4, "rtx4090", 36), (4, 2, "rtx4090", 34)],
)
def test_search_finds_the_same_winner_as_exhaustive_enumeration(
    make_request: MakeRequest, devices: int, batch: int, gpu: str, layers: int
) -> None:
    request = make_request("gpt2-large", devices, gpu, batch)
    shape = replace(request.template.shape, layers=layers)
    request = replace(request, template=replace(request.template, shape=shape))
    plan = search_configurations(request)
    every = list(every_legal_configuration(request))
    assert plan.legal == len(every)
    by_time = sorted(
        (evaluate_closed_form(request, spec) for spec in every),
        key=lambda candidate: candidate.seconds.total,
    )
    fastest = next(
        candidate.seconds.total
        for candidate in by_time
        if evaluate_configuration(request, candidate.spec).is_recommended
    )
    assert plan.winner is not None
    assert fastest <= plan.winner.seconds.total <= TIE_RATIO * fastest
    assert plan.lightest is not None
    assert plan.lightest.memory.total == min(find_peak_rank(c)[1].total for c in every)
    times = [candidate.seconds.total for candidate in plan.ranked]
    assert times[1:] == sorted(times[1:])
    assert min(times) == pytest.approx(fastest)
    assert all(not find_violations(candidate.spec) for candidate in plan.ranked)


@pytest.mark.parametrize(
    ("model", "devices", "batch", "gpu"),
    [
        ("gpt2-large", 4, 48, "rtx4090"),
        ("gpt3-175b", 512, 768, "a100"),
        ("mixtral-8x7b", 16, 96, "h100"),
    ],
)
def test_seconds_per_sample_do_not_grow_with_the_micro_batch(
    make_request: MakeRequest, model: str, devices: int, batch: int, gpu: str
) -> None:
    request = make_request(model, devices, gpu, batch)
    template = request.template
    for split in list(enumerate_splits(template.shape, devices))[::7]:
        sizes = list_micro_batch_sizes(split, batch)
        specs = (build_unsharded_spec(template, split, size, Recompute.NONE) for size in sizes)
        seconds = [pipeline_seconds(spec, request.cluster)[0].total for spec in specs]
        for (small, less), (large, more) in combinations(zip(sizes, seconds, strict=True), 2):
            share = 1 - 1e-9 if large % small == 0 else LEAST_SAMPLE_TIME_RATIO
            assert less / small >= share * more / large


@pytest.mark.parametrize(
    ("model", "devices", "batch", "gpu"),
    [("mixtral-8x7b", 16, 4, "h100"), ("moe-tiny", 4, 4, "cpu")],
)
def test_pruned_candidates_of_a_mixture_are_slower_than_all_kept_ones(
    make_request: MakeRequest, model: str, devices: int, batch: int, gpu: str
) -> None:
    request = make_request(model, devices, gpu, batch)
    plan, everything = search_configurations(request), search_configurations(request, kept=100_000)
    assert len(everything.examined) > len(plan.examined)
    first, *kept = ((candidate.strategy, candidate.seconds.total) for candidate in plan.ranked)
    every = [(candidate.strategy, candidate.seconds.total) for candidate in everything.ranked]
    assert first == every[0]
    assert kept == every[1 : len(plan.ranked)]


def test_two_h200_are_best_used_data_parallel(plan_of_gpt2_large: Plan) -> None:
    plan = plan_of_gpt2_large
    assert plan.ranked[0].strategy in {"dp2", "dp2-zero1"}
    assert len({candidate.strategy for candidate in plan.ranked}) == 10


def test_the_named_strategies_come_in_the_published_order(make_request: MakeRequest) -> None:
    named = evaluate_single_axis_strategies(make_request("gpt2-large", 2, "h200", 64))
    assert [candidate.strategy for candidate in named] == ["dp2", "cp2", "sp2", "tp2", "pp2"]
    times = {candidate.strategy: candidate.seconds.total for candidate in named}
    assert times["tp2"] == pytest.approx(times["sp2"], rel=0.025)


def test_illegal_named_strategies_are_left_out(make_request: MakeRequest) -> None:
    named = evaluate_single_axis_strategies(make_request("gpt2-xl", 2, "h200", 32))
    assert {candidate.strategy for candidate in named} == {"dp2", "cp2", "pp2"}


def test_named_strategies_train_the_requested_samples_in_micro_batches_that_fit(
    make_request: MakeRequest,
) -> None:
    named = evaluate_single_axis_strategies(make_request("gpt2-large", 2, "h200", 60))
    sizes = {candidate.strategy: candidate.spec.batch for candidate in named}
    assert sizes["dp2"] == Batch(2, 60)
    assert sizes["tp2"] == Batch(4, 60)


def test_175b_on_128_devices_is_split_in_every_dimension(plan_of_175b: Plan) -> None:
    plan = plan_of_175b
    assert plan.legal > 40_000
    assert plan.winner is not None
    split = plan.winner.spec.parallelism
    assert split.tensor > 1
    assert split.pipeline > 1
    assert split.data > 1


def test_126_layers_on_512_devices_use_pipeline_parallelism(
    make_request: MakeRequest,
) -> None:
    request = make_request("llama3-8b", 512, "h100", 64)
    shape = replace(
        request.template.shape,
        layers=126,
        hidden=16384,
        heads=128,
        ffn_hidden=53248,
    )
    request = replace(request, template=replace(request.template, shape=shape))
    plan = search_configurations(request, kept=1)
    assert plan.winner is not None
    assert plan.winner.spec.parallelism.pipeline > 2
    assert plan.winner.spec.stages == StageSplit(embedding=True, loss=True)
    command = make_command(request.model, plan.winner.spec)
    assert (
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split" in command
    )


def test_experts_are_searched_over_their_ranks(make_request: MakeRequest) -> None:
    request = make_request("gpt2-large", 4, "h200", 4)
    shape = replace(
        request.template.shape,
        layers=6,
        experts=8,
        experts_per_token=2,
        expert_ffn_hidden=5120,
        bias=False,
    )
    template = replace(request.template, shape=shape, dtype="bf16")
    plan = search_configurations(replace(request, template=template), kept=1000)
    degrees = {c.spec.parallelism.expert for c in plan.examined}
    assert degrees == {1, 2, 4}
    assert all(not find_violations(c.spec) for c in plan.ranked)


def test_full_experts_are_searched_under_tensor_parallelism(make_request: MakeRequest) -> None:
    request = make_request("mixtral-8x7b", 16, "h100", 256)
    splits = list(enumerate_splits(request.template.shape, 16))
    under_tensor = [split for split in splits if split.tensor > 1]
    assert {split.expert_tensor for split in under_tensor} == {0, 1}
    # Experts are split only where full experts cannot be on as many ranks.
    for split in under_tensor:
        ranks = split.expert * split.tensor
        assert bool(split.expert_tensor) or request.template.shape.experts % ranks
    stated = list(enumerate_splits(request.template.shape, 16, expert_tensor=2))
    assert {split.effective_expert_tensor for split in stated} == {2}


def test_modules_are_recomputed_where_that_is_faster_than_full_layers(
    make_request: MakeRequest,
) -> None:
    template = make_request("mixtral-8x7b", 16, "h100", 256).template
    modules = Recompute(frozenset({"layernorm", "moe_act"}))
    assert list_recomputes(template) == [Recompute.NONE, modules, Recompute.FULL]
    dense = make_request("gpt3-13b", 16, "h100", 256).template
    assert list_recomputes(dense) == [Recompute.NONE, Recompute.FULL]
    delayed = replace(template, fp8_recipe=Fp8Recipe.DELAYED)
    assert list_recomputes(delayed) == [Recompute.NONE, Recompute.FULL]


def test_tensor_parallelism_larger_than_a_node_is_not_searched(make_request: MakeRequest) -> None:
    request = make_request("gpt2-large", 16, "h100", 2)
    assert request.template.shape.heads == 16
    assert max(split.tensor for split in enumerate_splits(request.template.shape, 16)) == 16
    shape = replace(request.template.shape, layers=4)
    plan = search_configurations(
        replace(request, template=replace(request.template, shape=shape)), kept=1000
    )
    assert plan.legal == len(plan.examined)
    assert max(candidate.spec.parallelism.tensor for candidate in plan.examined) == 8


def test_frontier_contains_candidates_that_no_other_beats_in_time_and_memory(
    make_request: MakeRequest,
) -> None:
    plan = search_configurations(make_request("gpt2-large", 2, "h200", 16), slack=2.0)
    edge = select_pareto_frontier(plan.examined)
    assert edge[0].seconds.total == min(c.seconds.total for c in plan.examined)
    assert edge[-1].memory.total == min(c.memory.total for c in plan.examined)
    sizes = [c.memory.total for c in edge]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("model", "devices", "gpu", "batch"),
    [("gpt3-1.3b", 2, "rtx4090", 2), ("gpt3-13b", 8, "a100", 64), ("mixtral-8x7b", 16, "h100", 64)],
)
def test_a_plan_names_nothing_above_95_percent_of_a_device(
    make_request: MakeRequest, model: str, devices: int, gpu: str, batch: int
) -> None:
    request = make_request(model, devices, gpu, batch)
    for candidate in search_configurations(request).ranked:
        fraction = candidate.memory.total / request.cluster.device.memory_bytes
        assert candidate.is_recommended
        assert fraction <= 0.95
        assert candidate.verdict is (Fit.CLOSE if fraction > 0.9 else Fit.FITS)


def test_plan_of_a_model_that_fits_nowhere_has_no_winner_but_the_closest_candidate(
    make_request: MakeRequest,
) -> None:
    request = make_request("gpt3-175b", 8, "rtx4090", 8)
    plan = search_configurations(request)
    assert plan.winner is None
    assert plan.lightest is not None
    assert not plan.lightest.fits
    needed = find_devices_needed(request)
    assert needed is not None
    assert needed > 64


def test_indivisible_batch_has_no_legal_configuration(make_request: MakeRequest) -> None:
    request = make_request("gpt2-large", 7, "h200", 6)
    plan = search_configurations(request)
    assert plan.legal == 0
    assert plan.winner is plan.lightest is None


def test_scaling_efficiency_is_relative_to_the_fewest_devices_that_hold_the_model(
    make_request: MakeRequest,
) -> None:
    plan = search_configurations(make_request("gpt3-13b", 8, "h200", 64))
    scaled = compare_with_fewest_devices(plan)
    assert scaled is not None
    assert scaled.devices in {1, 2, 4}
    assert 0.5 < scaled.efficiency < 1.2
    days = estimate_training_days(plan, 300e9)
    assert plan.winner is not None
    assert days == pytest.approx(300e9 / plan.winner.tokens_per_second / 86400)


@pytest.mark.parametrize(
    "parallelism",
    [
        Parallelism(),
        Parallelism(data=2),
        Parallelism(data=2, sharding=Sharding.ZERO1),
        Parallelism(tensor=2, sequence_parallel=True),
        Parallelism(data=4, tensor=2, pipeline=2, virtual_stages=2),
        Parallelism(data=4, context=2, expert=2),
    ],
)
def test_names_are_those_of_the_grammar(parallelism: Parallelism) -> None:
    assert parse_strategy(strategy_name(parallelism), parallelism.world_size) == parallelism


def test_command_contains_only_flags_that_differ_from_the_recipe(make_request: MakeRequest) -> None:
    request = make_request("gpt2-large", 2, "h200", 64)
    split = Parallelism(data=2)
    usual = replace(request.template, parallelism=split, batch=Batch(32, 64))
    assert make_command(request.model, usual) == "make train-dp2-gpt2-large-2gpu"
    changed = replace(usual, batch=Batch(8, 64), recompute=Recompute.FULL, dtype="bf16")
    assert make_command(request.model, changed) == (
        "make train-dp2-gpt2-large-2gpu MICRO_BATCH=8 "
        'EXTRA="--recompute-granularity full --recompute-method uniform '
        '--recompute-num-layers 1 --bf16"'
    )


def test_plan_states_how_many_parameters_differ_from_the_published_model(
    make_request: MakeRequest,
) -> None:
    request = make_request("llama3-8b", 2, "h200", 64)
    split = replace(request.template, parallelism=Parallelism(tensor=2))
    assert trained_vocabulary_sentence(split).startswith(
        "Not the same model: the kit's data have GPT-2's tokens, so the trained vocabulary is 50,257 instead "
        "of 128,256. The trained model has 7,392,727,040 parameters, 637,534,208 fewer than 8,030,261,248. "
        "To train the model itself, set DATA="
    )
    gpt2_request = make_request("gpt2-large", 2, "h200", 64)
    assert trained_vocabulary_sentence(gpt2_request.template) == ""
    assert 637_534_208 == 2 * 4096 * (128_256 - 50_432)


def test_search_excludes_ring_attention_for_windowed_layers(make_request: MakeRequest) -> None:
    request = make_request("gpt2-large", 2, "h200", 4)
    split = Parallelism(context=2)
    assert list_cp_comm_types(request.template, split) == ("p2p", "all_gather", "a2a")
    shape = replace(request.template.shape, window=128, windowed_fraction=0.5)
    windowed = replace(request, template=replace(request.template, shape=shape))
    assert list_cp_comm_types(windowed.template, split) == ("all_gather", "a2a")
    specs = [
        candidate.spec
        for candidate in search_configurations(windowed).ranked
        if candidate.spec.parallelism.context > 1
    ]
    assert specs
    assert all(spec.cp_comm_type != "p2p" for spec in specs)


def test_interleaving_needs_micro_batches_in_multiples_of_the_stages() -> None:
    shape = small_shape()
    odd = RunSpec(shape, Parallelism(pipeline=2), Batch(1, 3))
    even = replace(odd, batch=Batch(1, 4))
    assert list_virtual_stages(odd.shape, odd.parallelism, odd.microbatches) == (1,)
    assert list_virtual_stages(even.shape, even.parallelism, even.microbatches) == (1, 2, 3, 6)
    assert len(list(enumerate_variants(even))) == 4


def small_shape() -> ModelShape:
    return ModelShape(12, 8, 2, 2, 4, 32, 16, 16)


def test_ties_are_decided_for_the_fewest_parallel_dimensions(make_request: MakeRequest) -> None:
    plan = search_configurations(make_request("gpt2-large", 4, "h100", 128))
    assert plan.winner is not None
    assert plan.winner.strategy == "dp4"
    assert len(plan.tied) > 2
    assert min(candidate.seconds.total for candidate in plan.tied) < plan.winner.seconds.total
    assert "tied with" in runner_up_sentence(plan.winner, plan.tied[0])


def test_clearly_faster_strategy_wins_regardless_of_its_dimensions(plan_of_175b: Plan) -> None:
    plan = plan_of_175b
    assert plan.winner is not None
    assert plan.winner.seconds.total <= TIE_RATIO * min(
        candidate.seconds.total for candidate in plan.ranked
    )
