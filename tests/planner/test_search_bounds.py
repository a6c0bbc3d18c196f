"""Lower bounds of a search against the times of the configurations that they stand for, at random."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from parakit.config.run import RunSpec
from parakit.planner.candidates import enumerate_variants
from parakit.planner.expert_options import NO_EXPERT_OPTIONS, ExpertOptions
from parakit.planner.options import PlanOptions
from parakit.planner.request import build_request
from parakit.planner.search import (
    Request,
    _Bound,
    _bound_all_splits,
    _narrow_bound,
    _use_expert_options,
)
from parakit.planner.time.iteration import iteration_seconds

_LIMITS = settings(
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
_OVERLAP_FLAGS = "--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap"
_QUESTIONS = {
    "dense": PlanOptions(model="gpt3-13b", gpu="a100", gpus=32, global_batch=192),
    "dense tuned": PlanOptions(
        model="llama3-8b", gpu="h100", gpus=16, global_batch=120, extra=_OVERLAP_FLAGS
    ),
    "pipeline": PlanOptions(model="gpt3-175b", gpu="a100", gpus=96, global_batch=480),
    "mixture": PlanOptions(model="mixtral-8x7b", gpu="h100", gpus=32, global_batch=240),
    "mixture tuned": PlanOptions(
        model="qwen3-30b-a3b", gpu="h100", gpus=32, global_batch=480, extra=_OVERLAP_FLAGS
    ),
    "small mixture tuned": PlanOptions(
        model="mixtral-8x7b", gpu="h100", gpus=16, global_batch=64, extra=_OVERLAP_FLAGS
    ),
    "latent attention tuned": PlanOptions(
        model="deepseek-v3", gpu="h800", gpus=512, global_batch=3840, extra=_OVERLAP_FLAGS
    ),
    "cores": PlanOptions(model="moe-tiny", gpu="cpu", gpus=4, global_batch=24),
}
"""Questions by name. Tuned mixtures may use DeepEP and overlapped communication of experts."""


@cache
def bound_question(name: str) -> tuple[Request, tuple[_Bound, ...]]:
    request = build_request(_QUESTIONS[name])
    is_tuned_mixture = "tuned" in name and request.template.shape.experts
    options = ExpertOptions(deep_ep=True, overlap=True) if is_tuned_mixture else NO_EXPERT_OPTIONS
    request = replace(request, expert_options=options)
    _, bounds, _ = _bound_all_splits(request)
    return request, tuple(bounds)


def narrow_at_random(request: Request, bound: _Bound, random: Random) -> list[_Bound]:
    """Return a bound and its successors, one for each choice; the last one stands for no choice, or for nothing."""
    bounds = [bound]
    while bounds[-1].unchosen:
        narrower = list(_narrow_bound(request, bounds[-1]))
        if not narrower:
            break
        bounds.append(random.choice(narrower))
    return bounds


def seconds_of_run(request: Request, spec: RunSpec) -> float:
    _, cluster = _use_expert_options(request, spec)
    return iteration_seconds(spec, cluster).total


def assert_bounded(name: str, seed: int) -> None:
    request, bounds = bound_question(name)
    random = Random(seed)
    path = narrow_at_random(request, random.choice(bounds), random)
    last = path[-1]
    if last.unchosen:
        return
    for spec in enumerate_variants(last.plain, last.shardings):
        virtual_stages = spec.parallelism.virtual_stages
        plain = replace(spec, token_dispatcher=request.template.token_dispatcher)
        for run in (spec, plain):
            seconds = seconds_of_run(request, run) * (1 + 1e-9)
            assert last.fixed + last.ramp / virtual_stages <= seconds
            assert max(bound.seconds for bound in path) <= seconds


@settings(_LIMITS, max_examples=25)
@given(st.sampled_from(sorted(_QUESTIONS)), st.integers(min_value=0, max_value=2**32))
def test_no_bound_exceeds_the_time_of_a_configuration_that_it_stands_for(
    name: str, seed: int
) -> None:
    assert_bounded(name, seed)


@pytest.mark.slow
@settings(_LIMITS, max_examples=500)
@given(st.sampled_from(sorted(_QUESTIONS)), st.integers(min_value=0, max_value=2**32))
def test_no_bound_of_five_hundred_exceeds_the_time_of_a_configuration(name: str, seed: int) -> None:
    assert_bounded(name, seed)
