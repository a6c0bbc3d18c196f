"""Reports to the ledger what Megatron's routers decide; Megatron logs mean losses, but no counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement, around
from parakit.accounting import record_routing
from parakit.config import variables


@dataclass
class _Decision:
    """What a router's parts computed for one micro batch before the router returns."""

    computed: torch.Tensor | None = None
    """With a capacity: which copies of tokens are computed, without padding."""
    dropped: torch.Tensor | int = 0
    loss: torch.Tensor | None = None


_decision = _Decision()
"""Of the router that is computing."""


@around
def routing(
    original: Callable[..., Any], router: Any, logits: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """`TopKRouter.routing`: logits [s, b, experts] to probabilities and map, [s·b, experts]."""
    vars(_decision).update(vars(_Decision()))
    probabilities, chosen = original(router, logits, *args, **kwargs)
    if router.training:
        record_routing(
            router.layer_number,
            logits.reshape(-1, logits.shape[-1]),
            chosen if _decision.computed is None else _decision.computed,
            dropped=_decision.dropped,
            load_balancing_loss=_decision.loss,
        )
    return probabilities, chosen


@around
def dropping(
    original: Callable[..., Any],
    probabilities: torch.Tensor,
    chosen: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`apply_router_token_dropping`: probabilities and map, before capacity and after."""
    answer = original(probabilities, chosen, *args, **kwargs)
    _decision.computed = chosen & answer[1]
    _decision.dropped = (chosen & ~answer[1]).sum()
    return answer


@around
def adding_loss(
    original: Callable[..., Any],
    router: Any,
    activation: torch.Tensor,
    coefficient: float,
    loss: torch.Tensor,
    name: str,
    reduce_group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`attach_and_log_load_balancing_loss`: called once for each kind of loss that is on."""
    # Each rank of the group holds its own tokens' share of the loss.
    whole = loss.detach() / coefficient * reduce_group.size()
    _decision.loss = whole if _decision.loss is None else _decision.loss + whole
    return original(router, activation, coefficient, loss, name, reduce_group, *args, **kwargs)


_ROUTER = "megatron.core.transformer.moe.router"
PATCH = Patch(
    name="routing",
    reason="Megatron does not report how many tokens each expert gets",
    needed=lambda context: variables.LEDGER in os.environ,
    replacements=(
        Replacement(f"{_ROUTER}:TopKRouter.routing", routing),
        Replacement(f"{_ROUTER}:TopKRouter.attach_and_log_load_balancing_loss", adding_loss),
        Replacement(f"{_ROUTER}:apply_router_token_dropping", dropping),
    ),
)
