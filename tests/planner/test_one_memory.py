"""A search and STRATEGY= predict one memory and one verdict for a strategy."""

from collections.abc import Callable
from functools import cache
from itertools import islice

import pytest

from parakit.config.hardware import device_by_key
from parakit.config.recompute import Recompute
from parakit.config.run import searched_flags
from parakit.costs.memory import find_peak_rank
from parakit.costs.replay import find_peak_device_memory, supports_replay
from parakit.planner.advice import StrategyFamily, find_best_of_each_family
from parakit.planner.largest import _enumerate_growing_models, find_largest_models
from parakit.planner.one_strategy import TimedStrategy, time_strategy
from parakit.planner.options import PlanOptions
from parakit.planner.request import build_request
from parakit.planner.result import plan_strategies
from parakit.planner.search import Candidate, Plan, Request, search_tied_strategies
from parakit.planner.verdict import Fit, recommended_bytes

GPT_BATCH_240 = PlanOptions(model="gpt2-8.3b", gpus=8, gpu="a100", dtype="bf16", global_batch=240)
QUESTIONS = {
    "llama3-8b on 8 H100": PlanOptions(model="llama3-8b", gpus=8, gpu="h100"),
    "gpt2-large in fp16 on 2 H200": PlanOptions(model="gpt2-large", gpus=2, gpu="h200"),
    "gpt3-1.3b on one L40S": PlanOptions(model="gpt3-1.3b", gpus=1, gpu="l40s"),
    "gpt2-8.3b on 8 A100": GPT_BATCH_240,
    "a mixture on 16 H100": PlanOptions(model="mixtral-8x7b", gpus=16, gpu="h100"),
    "tuned llama3-8b on 8 H100": PlanOptions(model="llama3-8b", gpus=8, gpu="h100", recipe="tuned"),
}


def predict_by_name(options: PlanOptions, request: Request, candidate: Candidate) -> TimedStrategy:
    """Return the prediction of `STRATEGY=` for a candidate, with the candidate's batch, recomputation and flags."""
    spec = candidate.spec
    flags = (*request.extra, *candidate.expert_options.flags, *searched_flags(spec))
    return time_strategy(
        PlanOptions(
            model=options.model,
            gpus=options.gpus,
            gpu=options.gpu,
            dtype=options.dtype,
            strategy=candidate.strategy,
            micro_batch=spec.batch.micro_batch_size,
            global_batch=spec.batch.global_batch_size,
            recompute=spec.recompute,
            extra=" ".join(flags),
        )
    )


@cache
def search_plan(question: str) -> Plan:
    return plan_strategies(QUESTIONS[question]).plan


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_ranked_strategy_has_the_memory_and_verdict_of_its_prediction_by_name(
    question: str,
) -> None:
    options, plan = QUESTIONS[question], search_plan(question)
    for candidate in plan.ranked:
        named = predict_by_name(options, plan.request, candidate).candidate
        assert named.strategy == candidate.strategy
        assert named.memory == candidate.memory
        assert named.verdict is candidate.verdict


def test_a_strategy_that_fits_only_by_the_closed_form_gives_way_to_one_that_fits() -> None:
    device_bytes = device_by_key("a100").memory_bytes
    usual = time_strategy(
        PlanOptions(
            model="gpt2-8.3b",
            gpu="a100",
            dtype="bf16",
            strategy="dp8-zero1",
            micro_batch=1,
            global_batch=240,
        )
    ).candidate
    assert find_peak_rank(usual.spec)[1].total < 0.9 * device_bytes
    assert usual.memory.total > recommended_bytes(device_bytes)
    plan = search_plan("gpt2-8.3b on 8 A100")
    assert plan.winner is not None
    assert plan.winner.seconds.total == pytest.approx(usual.seconds.total, rel=0.03)
    assert plan.winner.verdict is Fit.FITS
    assert find_peak_device_memory(plan.winner.spec)[1].total < 0.9 * device_bytes
    assert all(
        (candidate.strategy, candidate.spec.batch.micro_batch_size) != ("dp8-zero1", 1)
        for candidate in plan.ranked
    )


def test_a_smaller_micro_batch_of_the_same_strategy_takes_the_turn_of_one_that_does_not_fit() -> (
    None
):
    plan = search_plan("gpt3-1.3b on one L40S")
    sizes = {
        candidate.spec.batch.micro_batch_size
        for candidate in plan.examined
        if candidate.spec.recompute == Recompute.NONE and candidate.is_recommended
    }
    assert plan.winner is not None
    assert plan.winner.spec.batch.micro_batch_size < max(sizes)
    assert plan.winner.is_recommended


def test_single_kinds_of_parallelism_have_the_memory_of_their_prediction_by_name() -> None:
    options = QUESTIONS["llama3-8b on 8 H100"]
    request = build_request(options)
    best_by_family = find_best_of_each_family(request)
    assert StrategyFamily.PIPELINE in best_by_family
    for candidate in best_by_family.values():
        named = predict_by_name(options, request, candidate).candidate
        assert named.memory == candidate.memory
        assert named.verdict is candidate.verdict


def test_tied_strategies_are_those_of_the_plan_with_the_preferred_one_first(
    make_request: Callable[..., Request],
) -> None:
    plan = search_plan("gpt2-large in fp16 on 2 H200")
    tied = search_tied_strategies(plan.request)
    assert tied[0] == plan.winner
    assert {candidate.strategy for candidate in plan.tied} <= {
        candidate.strategy for candidate in tied
    }


def test_the_largest_models_have_the_memory_of_the_replay() -> None:
    device = device_by_key("rtx4090")
    models = [model for model in find_largest_models(device, 2) if model.recompute == "none"]
    replayed = 0
    for model in models:
        specs = islice(_enumerate_growing_models(model.strategy, 2, 2048, "bf16"), 60)
        spec = next(
            spec
            for spec in specs
            if (spec.shape.layers, spec.shape.hidden) == (model.layers, model.hidden)
        )
        replayed += supports_replay(spec)
        _, memory = find_peak_device_memory(spec, device.memory_bytes)
        assert model.memory_bytes == memory.total <= recommended_bytes(device.memory_bytes)
    assert replayed >= 3
