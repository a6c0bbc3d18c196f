from collections.abc import Callable
from dataclasses import replace

import pytest

from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec, TokenDispatcher
from parakit.config.strategy import Batch, parse_strategy
from parakit.planner.expert_options import (
    ExpertOptions,
    choose_expert_options,
    explain_refused_overlap,
)
from parakit.planner.one_strategy import time_strategy
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.search import Request, search_configurations
from parakit.planner.show import plan_command

MakeRequest = Callable[..., Request]
ALL = ExpertOptions(deep_ep=True, overlap=True)


def build_spec(make_request: MakeRequest, strategy: str, devices: int) -> RunSpec:
    template = make_request("mixtral-8x7b", devices, "h100", 256).template
    parallelism = parse_strategy(strategy, devices)
    return replace(template, parallelism=parallelism, batch=Batch(1, 256))


@pytest.mark.parametrize(
    ("strategy", "change", "reason"),
    [
        ("dp16-zero1", {}, "needs expert parallelism"),
        ("pp2ep8-zero1", {}, "needs virtual stages with PP 2"),
        ("ep8dp2-zero1", {"recompute": Recompute.FULL}, "refuses to recompute full layers"),
        ("ep8dp2-zero1", {"token_dispatcher": TokenDispatcher.ALL_GATHER}, "alltoall or flex"),
        ("ep8dp2-zero1", {"dtype": "fp32"}, "needs half precision"),
        ("ep8dp2-zero1", {}, ""),
        ("vpp2ep8-zero1", {}, ""),
    ],
)
def test_overlapped_experts_are_used_where_megatron_accepts_them(
    make_request: MakeRequest, strategy: str, change: dict[str, object], reason: str
) -> None:
    spec = replace(build_spec(make_request, strategy, 16), **change)  # type: ignore[arg-type]
    assert reason in explain_refused_overlap(spec)
    assert choose_expert_options(spec, ALL).overlap is not bool(reason)


def test_one_strategy_with_refused_overlap_is_refused_with_the_way_out() -> None:
    options = PlanOptions(
        model="deepseek-v3",
        gpu="h800",
        global_batch=15360,
        micro_batch=1,
        strategy="pp16ep64dp2-zero1",
        extra="--overlap-moe-expert-parallel-comm --decoder-last-pipeline-num-layers 1",
    )
    with pytest.raises(RequestError, match="needs virtual stages with PP 16; use vpp16, or leave"):
        time_strategy(options)


def test_deep_ep_is_used_only_with_a_number_of_ranks_that_it_knows(
    make_request: MakeRequest,
) -> None:
    assert choose_expert_options(build_spec(make_request, "ep8dp2", 16), ALL).deep_ep
    assert not choose_expert_options(build_spec(make_request, "dp16", 16), ALL).deep_ep


def test_search_uses_options_for_experts_and_the_command_names_them(
    make_request: MakeRequest,
) -> None:
    request = make_request("mixtral-8x7b", 16, "h100", 32)
    plain = search_configurations(request, kept=3).winner
    plan = search_configurations(replace(request, expert_options=ALL), kept=3)
    assert plain is not None
    assert plan.winner is not None
    assert min(candidate.seconds.total for candidate in plan.ranked) < plain.seconds.total
    for candidate in plan.ranked:
        used = candidate.expert_options
        command = plan_command(plan.request, candidate)
        assert used.overlap is ("--overlap-moe-expert-parallel-comm" in command)
        assert used.deep_ep is ("--moe-flex-dispatcher-backend deepep" in command)
        assert used.deep_ep is (candidate.spec.token_dispatcher is TokenDispatcher.DEEP_EP)
