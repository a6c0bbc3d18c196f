"""Run collectives on gloo with parts of different sizes, which a router decides.

`PATCH` replaces `_gather_along_first_dim` and `_reduce_scatter_along_first_dim` of Megatron's mappings, and
`allgather_params` of the layer-wise optimizer. The tensor-parallel ranks that share an expert each have as many
tokens as were routed to it. NCCL gathers and reduce-scatters parts of any size, gloo only equal parts; without the
patch, gloo would refuse them. An all-to-all takes parts of any size and sends the same bytes: every rank's part to
every other rank. The layer-wise optimizer gathers lists of full weights. Ranks have unequal numbers of weights, so
each rank broadcasts its own.

`SPLITS` replaces `maybe_move_tensor_to_cpu`. The all-to-all needs its split sizes as numbers. Megatron makes NumPy
arrays of them where it copies them from a GPU. Without the patch, tensors that are on the host already would stay
tensors, and gloo refuses tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import distributed
from torch.distributed import ProcessGroup

from megatron_patches.registry import Replacement, cpu_patch, wrap_original


def gather_parts(part: torch.Tensor, group: ProcessGroup, rows: Sequence[int]) -> torch.Tensor:
    """Return the parts of all ranks, concatenated in the order of the ranks, by an all-to-all.

    Args:
        part: This rank's part, [rows of this rank, …].
        group: The ranks.
        rows: Number of rows of each rank's part.

    Returns:
        A tensor [sum(rows), …], the same on every rank.
    """
    ranks, local_rows = len(rows), part.shape[0]
    full = part.new_empty((sum(rows), *part.shape[1:]))
    # One copy of the part per rank, one below the other, because every rank gets all of it.
    num_other_dimensions = part.dim() - 1
    copies = part.repeat(ranks, *[1] * num_other_dimensions)
    distributed.all_to_all_single(full, copies, list(rows), [local_rows] * ranks, group=group)
    return full


def reduce_scatter_parts(
    full: torch.Tensor, group: ProcessGroup, rows: Sequence[int]
) -> torch.Tensor:
    """Return this rank's part of the sum over all ranks, by an all-to-all and a local sum.

    Args:
        full: This rank's tensor, [sum(rows), …].
        group: The ranks.
        rows: Number of rows of each rank's part.

    Returns:
        A tensor [rows of this rank, …].
    """
    ranks, local_rows = len(rows), rows[group.rank()]
    parts = full.new_empty((ranks * local_rows, *full.shape[1:]))
    received_rows = [local_rows] * ranks
    distributed.all_to_all_single(parts, full.contiguous(), received_rows, list(rows), group=group)
    return parts.view(ranks, local_rows, *full.shape[1:]).sum(dim=0)


def _replace_on_gloo(
    collective: Callable[[torch.Tensor, ProcessGroup, Sequence[int]], torch.Tensor],
) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Return a `Replacement.make` for a function that calls `collective` if the group uses gloo and rows are given.

    Without rows, and for other backends, the function calls the original.
    """

    @wrap_original
    def call(
        original: Callable[..., torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup,
        rows: Sequence[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        # Equal parts are sent by `collective` as well, so that every iteration makes the same calls.
        if rows is None or distributed.get_backend(group) != "gloo":
            return original(tensor, group, rows, *args, **kwargs)
        return collective(tensor, group, rows)

    return call


@wrap_original
def _convert_to_numpy(
    original: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """Call `maybe_move_tensor_to_cpu` and return a NumPy array if the caller asks for one."""
    moved = original(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved


def gather_list(
    parts: Sequence[torch.Tensor], local_part: torch.Tensor, group: ProcessGroup
) -> None:
    """Fill `parts`, which has one tensor per rank, by one broadcast per rank. The tensors may differ in shape.

    This function replaces `torch.distributed.all_gather`. `local_part` is the tensor that this rank sends.
    """
    for rank, part in enumerate(parts):
        tensor = local_part if rank == group.rank() else part
        distributed.broadcast(tensor, group=group, group_src=rank)


@wrap_original
def _gather_by_broadcasts(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call the original with `gather_list` in place of `torch.distributed.all_gather`."""
    all_gather = distributed.all_gather
    distributed.all_gather = gather_list  # type: ignore[assignment]
    try:
        original(*args, **kwargs)
    finally:
        distributed.all_gather = all_gather


_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
SPLITS = cpu_patch(
    "expert_splits",
    "split sizes of the expert all-to-all stay tensors on the host, and gloo needs numbers",
    Replacement(
        "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu", _convert_to_numpy
    ),
)
PATCH = cpu_patch(
    "variable_size_collectives",
    "gloo gathers and reduce-scatters only parts of equal length",
    Replacement(f"{_MAPPINGS}:_gather_along_first_dim", _replace_on_gloo(gather_parts)),
    Replacement(
        f"{_MAPPINGS}:_reduce_scatter_along_first_dim", _replace_on_gloo(reduce_scatter_parts)
    ),
    Replacement(f"{_LAYER_WISE}.allgather_params", _gather_by_broadcasts, since=Version("0.17")),
)
