from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parakit.config.strategy import Parallelism, Sharding
from parakit.planner.advice import (
    StrategyFamily,
    bottleneck_sentence,
    describe_saving,
    describe_strategy,
    families_sentence,
    find_best_of_each_family,
    name_bottleneck,
    no_fit_sentence,
    one_device_sentence,
    runner_up_sentence,
    strategy_family,
    tie_sentence,
)
from parakit.planner.search import Plan, Request, search_configurations
from parakit.planner.time.iteration import TIME_COMPONENTS

MakeRequest = Callable[..., Request]


@pytest.mark.parametrize(
    ("parallelism", "kind"),
    [
        (Parallelism(), StrategyFamily.SINGLE),
        (Parallelism(data=2), StrategyFamily.DATA),
        (Parallelism(data=2, sharding=Sharding.ZERO1), StrategyFamily.DATA),
        (Parallelism(data=2, sharding=Sharding.ZERO3), StrategyFamily.SHARDED_DATA),
        (Parallelism(tensor=2, sequence_parallel=True), StrategyFamily.TENSOR),
        (Parallelism(pipeline=2), StrategyFamily.PIPELINE),
        (Parallelism(data=2, tensor=2), StrategyFamily.HYBRID),
    ],
)
def test_every_strategy_belongs_to_a_family(parallelism: Parallelism, kind: StrategyFamily) -> None:
    assert strategy_family(parallelism) is kind


@pytest.mark.parametrize(
    ("parallelism", "written"),
    [
        (Parallelism(), "one device"),
        (
            Parallelism(
                data=32, tensor=4, pipeline=8, sequence_parallel=True, sharding=Sharding.ZERO1
            ),
            "TP 4 with SP × PP 8 × DP 32, ZeRO-1",
        ),
        (
            Parallelism(data=8, tensor=2, context=2, pipeline=4, virtual_stages=3, expert=8),
            "TP 2 × CP 2 × PP 4 with 3 virtual stages each × DP 8, EP 8",
        ),
    ],
)
def test_a_strategy_is_written_out(parallelism: Parallelism, written: str) -> None:
    assert describe_strategy(parallelism) == written


def test_a_small_model_needs_one_device(plan_of_gpt2_large: Plan) -> None:
    plan = plan_of_gpt2_large
    winner = plan.ranked[0]
    assert "The bottleneck is arithmetic" in bottleneck_sentence(plan)
    assert "One device is enough" in one_device_sentence(plan.request, winner)
    assert "(vpp2x18). Context parallelism takes" in families_sentence(plan, winner)


def test_a_large_model_does_not_fit_one_device(plan_of_175b: Plan) -> None:
    plan = plan_of_175b
    winner = plan.ranked[0]
    assert one_device_sentence(plan.request, winner).startswith("One device is not enough")
    assert "cannot be split evenly" in families_sentence(plan, winner)


def test_the_runner_up_is_compared_in_numbers(make_request: MakeRequest) -> None:
    plan = search_configurations(make_request("gpt3-1.3b", 8, "rtx4090", 64))
    first, *remaining = plan.ranked
    slower = next(candidate for candidate in remaining if not candidate.is_tied(first))
    assert "ms of" in runner_up_sentence(first, slower)


def test_three_ties_are_named_and_the_others_counted(plan_of_gpt2_large: Plan) -> None:
    plan = plan_of_gpt2_large
    winner = plan.ranked[0]
    rule = "too close to rank, but all of them take longer."
    three = replace(plan, ranked=(winner,) * 4)
    assert tie_sentence(three) == f"dp2, dp2 and dp2 within 3% are {rule}"
    five = replace(plan, ranked=(winner,) * 6)
    assert tie_sentence(five) == f"dp2, dp2, dp2 and 2 more within 3% (ALL=1) are {rule}"
    single = replace(plan, ranked=(winner,) * 2)
    assert tie_sentence(single) == "dp2 within 3% is too close to rank, but it takes longer."


def test_every_part_of_the_time_has_a_sentence_for_saving_it(plan_of_gpt2_large: Plan) -> None:
    winner = plan_of_gpt2_large.ranked[0]
    for part in TIME_COMPONENTS:
        longer: dict[str, Any] = {part: getattr(winner.seconds, part) + 1.0}
        slower = replace(winner, seconds=replace(winner.seconds, **longer))
        assert describe_saving(winner, slower).startswith("saves 1,000.0 ms of ")


def test_slow_network_is_named_as_the_bottleneck(make_request: MakeRequest) -> None:
    plan = search_configurations(make_request("gpt3-1.3b", 8, "rtx4090", 64, per_node=1))
    assert name_bottleneck(plan).startswith("ethernet-10g (")


def test_memory_is_named_as_the_bottleneck_if_the_device_is_full(make_request: MakeRequest) -> None:
    plan = search_configurations(make_request("gpt3-13b", 8, "a100", 512))
    assert name_bottleneck(plan) == "memory"
    assert "The bottleneck is memory" in bottleneck_sentence(plan)


def test_refusal_of_a_configuration_that_does_not_fit_names_the_missing_memory(
    make_request: MakeRequest,
) -> None:
    sentence = no_fit_sentence(search_configurations(make_request("gpt3-13b", 2, "rtx4090", 2)))
    assert "does not fit on 2 GeForce RTX 4090" in sentence
    assert "misses by" in sentence


def test_each_pure_family_is_represented_by_its_best(make_request: MakeRequest) -> None:
    request = make_request("gpt2-large", 2, "h200", 64)
    kinds = find_best_of_each_family(request)
    pure = {
        StrategyFamily.DATA,
        StrategyFamily.SHARDED_DATA,
        StrategyFamily.TENSOR,
        StrategyFamily.CONTEXT,
        StrategyFamily.PIPELINE,
    }
    assert set(kinds) == pure
    small = replace(request.cluster.device, memory_bytes=2**30)
    cramped = replace(request, cluster=replace(request.cluster, device=small))
    assert not any(candidate.fits for candidate in find_best_of_each_family(cramped).values())
