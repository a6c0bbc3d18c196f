"""Capture the scores and choices of each router; another run's choice can replace them.

The hook stands where Megatron has its own replay of routing (`TopKRouter.router_replay`), between the
scores and the choice. A Megatron without a replay (0.15) gets it around the first choice in a call of
`TopKRouter.routing`. Routers that choose in another way (sinkhorn, quantiles) are left alone: their maps
are compared as any other output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, cast
from unittest.mock import patch

import torch

from megatron_patches.capture.probes import is_in_backward, list_modules
from parakit.artifacts.capture import CHOICE, SCORES, CaptureStage, TensorKey


class RoutingSink(Protocol):
    """Receiver of the routers' scores and choices, which may replace a choice."""

    def write(self, tensor_key: TensorKey, tensor: torch.Tensor) -> object:
        """Take the scores of a router."""

    def choose(self, tensor_key: TensorKey, chosen: torch.Tensor) -> torch.Tensor | None:
        """Take a router's choice [tokens, experts]; return the choice to make, or None if it stays."""


@contextmanager
def capture_routing(
    chunks: list[torch.nn.Module], names: list[dict[str, str]], sink: RoutingSink, earlier: str = ""
) -> Iterator[None]:
    """Pass every choice of the routers to the sink while the context is open.

    Args:
        chunks: Chunks of the model.
        names: One dictionary per chunk: each module's global name by its name in the chunk.
        sink: Takes the scores and choices, and may return another choice.
        earlier: Beginning of the slots' names in an iteration before the captured one.
    """
    with ExitStack() as replacements:
        for name, module in list_modules(chunks, names):
            choices = _Choices(name, sink, earlier)
            if "router_replay" in vars(module) and module.router_replay is None:
                replacements.enter_context(patch.object(module, "router_replay", choices))
            elif _is_router_without_replay(module):
                routing = _wrap_routing(cast(Any, module.routing), choices)
                replacements.enter_context(patch.object(module, "routing", routing))
        yield


def _is_router_without_replay(module: torch.nn.Module) -> bool:
    """Return True for a router of a Megatron without a replay that chooses the highest scores."""
    is_router = hasattr(module, "routing") and hasattr(module, "topk")
    has_replay = hasattr(module, "router_replay")
    return is_router and not has_replay and getattr(module, "routing_type", "") != "sinkhorn"


def _wrap_routing(routing: Callable[..., Any], choices: _Choices) -> Callable[..., Any]:
    """Return a router's `routing` that makes its first choice through `choices`.

    The first choice is the first call of `torch.topk` over experts or of `group_limited_topk`. Later
    calls are the originals.
    """
    from megatron.core.transformer.moe import moe_utils

    topk, group_limited_topk = torch.topk, moe_utils.group_limited_topk

    @functools.wraps(routing)
    def routing_with_choices(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as replacements:

            def choose_first(scores: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
                if dim != 1:
                    return topk(scores, k, dim, **options)

                def choose_experts(scores: torch.Tensor, k: int, **_: Any) -> Any:
                    return topk(scores, k, dim)

                # This puts the originals back.
                replacements.close()
                return choices.get_replay_topk(scores, k, default_compute_topk=choose_experts)

            def choose_first_in_groups(scores: torch.Tensor, topk: int, **groups: Any) -> Any:
                def choose_experts(scores: torch.Tensor, k: int, **_: Any) -> Any:
                    return group_limited_topk(scores, k, **groups)

                replacements.close()
                return choices.get_replay_topk(scores, topk, default_compute_topk=choose_experts)

            replacements.enter_context(patch.object(torch, "topk", choose_first))
            replacements.enter_context(
                patch.object(moe_utils, "group_limited_topk", choose_first_in_groups)
            )
            return routing(*args, **kwargs)

    return routing_with_choices


class _Choices:
    """The choices of one router, with the method of Megatron's `RouterReplay` that a router calls."""

    def __init__(self, name: str, sink: RoutingSink, earlier: str) -> None:
        self._name, self._sink, self._earlier = name, sink, earlier
        self._replacements: list[torch.Tensor | None] = []
        """The choice that replaces the router's, per micro batch; None keeps the router's choice."""
        self._num_recomputed = 0
        """Number of micro batches whose forward pass has been recomputed in backward."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the numbers of the chosen experts, both [tokens, topk].

        `scores` is [tokens, experts]. The router's choice goes to the sink, which may replace it. A
        recomputed forward pass makes the same choice as the pass before.
        """
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        if is_in_backward():
            replacement = self._replacements[self._num_recomputed]
            self._num_recomputed += 1
        else:
            replacement = self._write_choice(scores.detach(), chosen)
            self._replacements.append(replacement)
        if replacement is None:
            return values, chosen
        return scores.gather(1, replacement), replacement

    def _write_choice(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """Pass a router's scores and choice to the sink, and return the choice that the router must use.

        The result has the shape of `chosen`. None keeps the router's own choice; this is also the result if
        the sink's choice has another number of tokens or experts.
        """
        self._sink.write(self._make_tensor_key(SCORES), scores)
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        replacement = self._sink.choose(self._make_tensor_key(CHOICE), is_chosen)
        if replacement is None or replacement.shape != is_chosen.shape:
            return None
        # Each row of `nonzero` is the number of a token and of an expert that the token goes to.
        expert_numbers = replacement.nonzero()[:, 1]
        return expert_numbers.view(chosen.shape).to(chosen.device)

    def _make_tensor_key(self, slot: str) -> TensorKey:
        """Return the key of a tensor of this router in the next micro batch."""
        micro_batch = len(self._replacements)
        return TensorKey(CaptureStage.OUTPUTS, self._name, self._earlier + slot, micro_batch)
