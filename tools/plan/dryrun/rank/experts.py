"""Routing without contents: every expert gets the same number of tokens, the rest go to the first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_patches.registry import Patch, Replacement


def even_loads(routed: int, experts: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens for each expert, shape [experts], summing to `routed`."""
    loads = np.full(experts, routed // experts, dtype=np.int64)
    loads[: routed % experts] += 1
    return loads


def _evenly(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def preprocess(dispatcher: Any, routing_map: Any) -> Any:
        original(dispatcher, routing_map)  # Its all-gather of counts is one of the calls to see.
        tensor, expert, local = dispatcher.tp_size, dispatcher.ep_size, dispatcher.num_local_experts
        loads = even_loads(dispatcher.num_out_tokens, dispatcher.num_experts)
        own = dispatcher.local_expert_indices[0]
        from_each = np.tile(loads[own : own + local], (tensor, expert, 1))
        if expert > 1 or tensor > 1:
            dispatcher.input_splits = loads.reshape(expert, local).sum(axis=1)
            dispatcher.output_splits = from_each.sum(axis=2)[0]
            dispatcher.output_splits_tp = from_each.sum(axis=(1, 2))
        if local > 1:
            dispatcher.num_global_tokens_per_local_expert = from_each.reshape(-1, local)
            order = np.arange(tensor * dispatcher.num_experts)
            dispatcher.sort_input_by_local_experts = order.reshape(-1, local).T.ravel()
            dispatcher.restore_output_by_local_experts = order.reshape(local, -1).T.ravel()
        return from_each.sum(axis=(0, 1))

    return preprocess


EVEN_ROUTING = Patch(
    name="even_routing",
    reason="how many tokens an expert gets is read from the router's output, which has no contents",
    needed=lambda context: True,
    replacements=(
        Replacement(
            "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess",
            _evenly,
        ),
    ),
)
