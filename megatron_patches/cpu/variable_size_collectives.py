"""Collectives whose parts differ in size, because a router decides it, on CPU ranks.

The tensor-parallel ranks that share an expert each bring as many tokens as were routed to it. NCCL
gathers and reduce-scatters such parts; gloo needs equal ones. An all-to-all takes any, and over a group
sends the same bytes: every rank's part to every other. The all-to-all in turn needs its split sizes as
numbers: Megatron makes NumPy arrays of them where it copies them from a GPU, so tensors that are on the
host already stay tensors. The layer-wise optimizer gathers lists of whole weights, of which ranks have
unequal numbers: there each rank broadcasts its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import distributed
from torch.distributed import ProcessGroup

from megatron_patches.registry import Replacement, around, cpu_patch


def gather_parts(part: torch.Tensor, group: ProcessGroup, rows: Sequence[int]) -> torch.Tensor:
    """All ranks' parts, concatenated: [rows of this rank, …] to [sum(rows), …]."""
    ranks, own = len(rows), part.shape[0]
    whole = part.new_empty((sum(rows), *part.shape[1:]))
    copies = part.repeat(ranks, *(1 for _ in part.shape[1:]))
    distributed.all_to_all_single(whole, copies, list(rows), [own] * ranks, group=group)
    return whole


def reduce_scatter_parts(
    whole: torch.Tensor, group: ProcessGroup, rows: Sequence[int]
) -> torch.Tensor:
    """This rank's part of the ranks' sum: [sum(rows), …] to [rows of this rank, …]."""
    ranks, own = len(rows), rows[group.rank()]
    parts = whole.new_empty((ranks * own, *whole.shape[1:]))
    distributed.all_to_all_single(parts, whole.contiguous(), [own] * ranks, list(rows), group=group)
    return parts.view(ranks, own, *whole.shape[1:]).sum(dim=0)


def _on_gloo(
    by_all_to_all: Callable[[torch.Tensor, ProcessGroup, Sequence[int]], torch.Tensor],
) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    @around
    def call(
        original: Callable[..., torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup,
        rows: Sequence[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        # Equal parts too, so that every iteration makes the same calls.
        if rows is None or distributed.get_backend(group) != "gloo":
            return original(tensor, group, rows, *args, **kwargs)
        return by_all_to_all(tensor, group, rows)

    return call


@around
def _as_numpy(
    original: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    moved = original(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved


def gather_list(parts: Sequence[torch.Tensor], own: torch.Tensor, group: ProcessGroup) -> None:
    """`torch.distributed.all_gather` of parts of any lengths; `own` is this rank's element."""
    for rank, part in enumerate(parts):
        distributed.broadcast(own if rank == group.rank() else part, group=group, group_src=rank)


@around
def _of_any_lengths(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    equal = distributed.all_gather
    distributed.all_gather = gather_list  # type: ignore[assignment]
    try:
        original(*args, **kwargs)
    finally:
        distributed.all_gather = equal


_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
SPLITS = cpu_patch(
    "expert_splits",
    "split sizes of the expert all-to-all stay tensors on the host, and gloo needs numbers",
    Replacement(
        "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu", _as_numpy
    ),
)
PATCH = cpu_patch(
    "variable_size_collectives",
    "gloo gathers and reduce-scatters only parts of equal length",
    Replacement(f"{_MAPPINGS}:_gather_along_first_dim", _on_gloo(gather_parts)),
    Replacement(f"{_MAPPINGS}:_reduce_scatter_along_first_dim", _on_gloo(reduce_scatter_parts)),
    Replacement(f"{_LAYER_WISE}.allgather_params", _of_any_lengths, since=Version("0.17")),
)
