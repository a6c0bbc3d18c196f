"""Gathering and scattering parts of different lengths on CPU ranks, as all-to-alls.

The tensor-parallel ranks that share an expert each bring as many tokens as were routed to it. NCCL
gathers and reduce-scatters such parts; gloo wants equal ones. An all-to-all takes any, and over a group
sends the same bytes: every rank's part to every other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from megatron_patches.registry import Patch, Replacement


def gather_uneven(part: torch.Tensor, group: ProcessGroup, rows: Sequence[int]) -> torch.Tensor:
    """All ranks' parts, one behind another: [rows of this rank, …] to [sum(rows), …]."""
    ranks, own = len(rows), part.shape[0]
    whole = part.new_empty((sum(rows), *part.shape[1:]))
    copies = part.repeat(ranks, *(1 for _ in part.shape[1:]))
    distributed.all_to_all_single(whole, copies, list(rows), [own] * ranks, group=group)
    return whole


def reduce_scatter_uneven(
    whole: torch.Tensor, group: ProcessGroup, rows: Sequence[int]
) -> torch.Tensor:
    """This rank's part of the ranks' sum: [sum(rows), …] to [rows of this rank, …]."""
    ranks, own = len(rows), rows[group.rank()]
    parts = whole.new_empty((ranks * own, *whole.shape[1:]))
    distributed.all_to_all_single(parts, whole.contiguous(), [own] * ranks, list(rows), group=group)
    return parts.view(ranks, own, *whole.shape[1:]).sum(dim=0)


def _on_gloo(
    uneven: Callable[[torch.Tensor, ProcessGroup, Sequence[int]], torch.Tensor],
) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    def make(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def call(
            tensor: torch.Tensor,
            group: ProcessGroup,
            rows: Sequence[int] | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            # All of them, so that iterations whose parts happen to be equal make no other calls.
            if rows is None or distributed.get_backend(group) != "gloo":
                return original(tensor, group, rows, *args, **kwargs)
            return uneven(tensor, group, rows)

        return call

    return make


_MAPPINGS = "megatron.core.tensor_parallel.mappings"
PATCH = Patch(
    name="uneven_parts",
    reason="gloo gathers and reduce-scatters only parts of equal length",
    needed=lambda situation: situation.on_cpu,
    replacements=(
        Replacement(f"{_MAPPINGS}:_gather_along_first_dim", _on_gloo(gather_uneven)),
        Replacement(
            f"{_MAPPINGS}:_reduce_scatter_along_first_dim", _on_gloo(reduce_scatter_uneven)
        ),
    ),
)
