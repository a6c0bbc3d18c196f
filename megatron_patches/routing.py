"""Reports to the ledger what Megatron's routers decide; Megatron logs mean losses, but no counts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement
from tools.ledger.routing import record_routing
from tools.spec import variables


@dataclass
class _Decision:
    """What a router's parts computed for one micro batch before the router returns."""

    computed: torch.Tensor | None = None
    """With a capacity: which copies of tokens are computed, without padding."""
    dropped: torch.Tensor | int = 0
    loss: torch.Tensor | None = None


class _RouterHooks:
    """Wraps a router and those two of its parts that compute what it does not return."""

    def __init__(self) -> None:
        self._decision = _Decision()

    def routing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`TopKRouter.routing`: logits [s, b, experts] to probabilities and map, [s·b, experts]."""

        @functools.wraps(original)
        def routing(router: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            decision = self._decision = _Decision()
            probabilities, chosen = original(router, logits, *args, **kwargs)
            if router.training:
                record_routing(
                    router.layer_number,
                    logits.reshape(-1, logits.shape[-1]),
                    chosen if decision.computed is None else decision.computed,
                    dropped=decision.dropped,
                    load_balancing_loss=decision.loss,
                )
            return probabilities, chosen

        return routing

    def dropping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`apply_router_token_dropping`: probabilities and map, before capacity and after."""

        @functools.wraps(original)
        def drop(
            probabilities: torch.Tensor, chosen: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            answer = original(probabilities, chosen, *args, **kwargs)
            self._decision.computed = chosen & answer[1]
            self._decision.dropped = (chosen & ~answer[1]).sum()
            return answer

        return drop

    def loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`attach_and_log_load_balancing_loss`: called once for each kind of loss that is on."""

        @functools.wraps(original)
        def attach(
            router: Any,
            activation: torch.Tensor,
            coefficient: float,
            loss: torch.Tensor,
            name: str,
            reduce_group: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            # Each rank of the group holds its own tokens' share of the loss.
            whole = loss.detach() / coefficient * reduce_group.size()
            before = self._decision.loss
            self._decision.loss = whole if before is None else before + whole
            call = (router, activation, coefficient, loss, name, reduce_group)
            return original(*call, *args, **kwargs)

        return attach


_hooks = _RouterHooks()
_ROUTER = "megatron.core.transformer.moe.router"
PATCH = Patch(
    name="routing",
    reason="Megatron does not report how many tokens each expert gets",
    needed=lambda context: variables.LEDGER in os.environ,
    replacements=(
        Replacement(f"{_ROUTER}:TopKRouter.routing", _hooks.routing),
        Replacement(f"{_ROUTER}:TopKRouter.attach_and_log_load_balancing_loss", _hooks.loss),
        Replacement(f"{_ROUTER}:apply_router_token_dropping", _hooks.dropping),
    ),
)
