"""Report to the communication log how Megatron's routers spread tokens over experts.

Targets: `TopKRouter.routing`, `TopKRouter.attach_and_log_load_balancing_loss` and
`apply_router_token_dropping`; each is called and its result is noted. Megatron logs mean losses but no
counts. Without the patch, the report would not say how many tokens each expert gets and how many are
dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement, wrap_original
from parakit.accounting import record_routing
from parakit.config import variables


@dataclass
class _Decision:
    """The results of a router's parts for one micro batch, noted before the router returns."""

    computed: torch.Tensor | None = None
    """Map [tokens, experts] of the copies of tokens that are computed, without padding; None without a
    capacity."""
    dropped: torch.Tensor | int = 0
    """Number of copies that the capacity drops; 0 without a capacity."""
    loss: torch.Tensor | None = None
    """Load-balancing loss, summed over its kinds; None if none is on."""


_decision = _Decision()
"""Results of the router that is running now."""


@wrap_original
def record_decision(
    original: Callable[..., Any], router: Any, logits: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call `TopKRouter.routing` and record the decision, if the router is in training mode.

    The logits [s, b, experts] become probabilities and a map, both [s·b, experts].
    """
    vars(_decision).update(vars(_Decision()))
    probabilities, chosen_map = original(router, logits, *args, **kwargs)
    if router.training:
        record_routing(
            router.layer_number,
            logits.reshape(-1, logits.shape[-1]),
            chosen_map if _decision.computed is None else _decision.computed,
            dropped=_decision.dropped,
            load_balancing_loss=_decision.loss,
        )
    return probabilities, chosen_map


@wrap_original
def record_drops(
    original: Callable[..., Any],
    probabilities: torch.Tensor,
    chosen_map: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `apply_router_token_dropping` and note which copies of tokens it keeps and drops.

    The function takes probabilities and map before the capacity and returns both after it.
    """
    result = original(probabilities, chosen_map, *args, **kwargs)
    map_in_capacity = result[1]
    _decision.computed = chosen_map & map_in_capacity
    _decision.dropped = (chosen_map & ~map_in_capacity).sum()
    return result


@wrap_original
def record_loss(
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
    """Note the loss, then call `attach_and_log_load_balancing_loss`, which Megatron calls for each kind of loss."""
    # Each rank of the group has the part of the loss that its own tokens cause.
    group_loss = loss.detach() / coefficient * reduce_group.size()
    _decision.loss = group_loss if _decision.loss is None else _decision.loss + group_loss
    return original(router, activation, coefficient, loss, name, reduce_group, *args, **kwargs)


_ROUTER = "megatron.core.transformer.moe.router"
PATCH = Patch(
    name="routing",
    reason="Megatron does not report how many tokens each expert gets",
    needed=lambda context: variables.LEDGER in os.environ,
    replacements=(
        Replacement(f"{_ROUTER}:TopKRouter.routing", record_decision),
        Replacement(f"{_ROUTER}:TopKRouter.attach_and_log_load_balancing_loss", record_loss),
        Replacement(f"{_ROUTER}:apply_router_token_dropping", record_drops),
    ),
)
