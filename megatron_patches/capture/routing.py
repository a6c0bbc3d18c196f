"""Which experts each router chooses, of which scores; another run's choice can take its place.

It stands where Megatron keeps its own replay of routing (`TopKRouter.router_replay`), so that what is
chosen from and what is chosen are seen between the two. In a Megatron without a replay (0.15) the first
choice of a call of `TopKRouter.routing` is taken. Routers that choose otherwise (sinkhorn, quantiles)
are left alone: their maps are compared as any output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch

from megatron_patches.capture.probes import modules_of
from parakit.artifacts.capture import CHOICE, SCORES, Site, Stage
from parakit.capturing import Sink


@contextmanager
def watched_routing(
    chunks: list[torch.nn.Module], names: list[dict[str, str]], sink: Sink, earlier: str = ""
) -> Iterator[None]:
    """Hand every choice of one iteration to the sink.

    Args:
        chunks: Of the model.
        names: Each module's global name by its own, chunk by chunk.
        sink: What becomes of the choices.
        earlier: Begins the slots of an iteration before the one that is captured.
    """
    with ExitStack() as replaced:
        for name, module in modules_of(chunks, names):
            choices = _Choices(name, sink, earlier)
            if "router_replay" in vars(module) and module.router_replay is None:
                replaced.enter_context(patch.object(module, "router_replay", choices))
            elif _is_older(module):
                asking = _asking(cast(Any, module.routing), choices)
                replaced.enter_context(patch.object(module, "routing", asking))
        yield


def _is_older(module: torch.nn.Module) -> bool:
    """Whether it is a router of a Megatron without a replay, and chooses the best."""
    is_router = hasattr(module, "routing") and hasattr(module, "topk")
    has_replay = hasattr(module, "router_replay")
    return is_router and not has_replay and getattr(module, "routing_type", "") != "sinkhorn"


def _asking(routing: Callable[..., Any], choices: _Choices) -> Callable[..., Any]:
    """A router's `routing`; its first choice among experts, or groups of them, is that of `choices`."""
    from megatron.core.transformer.moe import moe_utils

    best, of_groups = torch.topk, moe_utils.group_limited_topk

    @functools.wraps(routing)
    def routed(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as replaced:

            def first(scores: torch.Tensor, k: int, dim: int = -1, **more: Any) -> Any:
                if dim != 1:
                    return best(scores, k, dim, **more)
                replaced.close()
                return choices.get_replay_topk(
                    scores, k, default_compute_topk=lambda scores, k, **_: best(scores, k, dim)
                )

            def first_of_groups(scores: torch.Tensor, topk: int, **groups: Any) -> Any:
                replaced.close()
                choose = functools.partial(of_groups, **groups)
                return choices.get_replay_topk(
                    scores, topk, default_compute_topk=lambda scores, k, **_: choose(scores, k)
                )

            replaced.enter_context(patch.object(torch, "topk", first))
            replaced.enter_context(patch.object(moe_utils, "group_limited_topk", first_of_groups))
            return routing(*args, **kwargs)

    return routed


class _Choices:
    """One router's, with the method of Megatron's `RouterReplay` that a router calls."""

    def __init__(self, name: str, sink: Sink, earlier: str) -> None:
        self._name, self._sink, self._earlier = name, sink, earlier
        self._given: list[torch.Tensor | None] = []
        """What takes the place of each micro batch's choice."""
        self._recomputed = 0

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose as the router does; scores [tokens, experts] to scores and numbers [tokens, topk]."""
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        # -1 outside of a backward pass, where forward passes are recomputed.
        if torch._C._current_graph_task_id() == -1:
            self._given.append(self._seen(scores.detach(), chosen))
            given = self._given[-1]
        else:
            given = self._given[self._recomputed]
            self._recomputed += 1
        if given is None:
            return values, chosen
        return scores.gather(1, given), given

    def _seen(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        micro_batch = len(self._given)
        sites = (
            Site(Stage.OUTPUTS, self._name, self._earlier + slot, micro_batch)
            for slot in (SCORES, CHOICE)
        )
        self._sink.write(next(sites), scores)
        which = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        given = self._sink.choose(next(sites), which)
        if given is None or given.shape != which.shape:
            return None
        return given.nonzero()[:, 1].view(chosen.shape).to(chosen.device)
