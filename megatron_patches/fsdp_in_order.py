"""Megatron-FSDP's gathers on CPU ranks: finished when they are issued.

With CUDA a gather left in flight is ordered by its stream against whatever reads, frees or sends next.
gloo's runs in a thread of its own that nothing orders: beside tensor parallelism a rank once died in
that thread, in memory that had been freed. Waiting where the gather is issued is the order of a stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import Patch, Replacement


def _without_overlap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:  # noqa: ARG001
        return original(group, device, async_ops=False)

    return manager


PATCH = Patch(
    name="fsdp_in_order",
    reason="gloo orders nothing between a gather in flight and what follows, as CUDA streams do",
    needed=lambda situation: situation.on_cpu,
    replacements=(
        Replacement(
            "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer:"
            "_coalescing_manager",
            _without_overlap,
        ),
    ),
)
