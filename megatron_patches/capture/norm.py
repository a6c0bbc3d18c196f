"""Record which elements of which parameters a rank counts in the gradient norm.

Megatron's selection is not repeated here. What it passes to the function that computes the norm is
recorded, and over which ranks that function sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import get_process_group_ranks

from megatron_patches.capture.parameters import OptimizerPart, ParameterMap
from parakit.capturing import Piece, local_tensor


class NormMembership:
    """The elements of parameters that one step of the optimizer counts in the norm."""

    def __init__(self, parameters: ParameterMap, optimizer: Any) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._counted: dict[tuple[int, ...], Counter[int]] = {}
        """How often each parameter (by id) is counted, by the ranks over which the norm is summed."""

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks over which norms were summed, one tuple per group."""
        return tuple(self._counted)

    def note(self, original: Callable[..., Any], gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Record which gradients a norm counts, then call `original` (`get_grad_norm_fp32`) and return its result."""
        all_gradients = [gradients] if isinstance(gradients, torch.Tensor) else gradients
        ranks = _find_summed_ranks(all_gradients, kwargs.get("grad_stats_parallel_group"))
        count_by_gradient = Counter(id(gradient) for gradient in all_gradients)
        counted: Counter[int] = Counter()
        for parameter, part in self._parameters.parts(self._optimizer):
            for gradient in _list_gradients(part):
                if count_by_gradient[id(gradient)]:
                    counted[id(parameter)] = count_by_gradient[id(gradient)]
        # Calls are combined by their maximum, not their sum: a norm may be computed twice and used once.
        self._counted[ranks] = self._counted.get(ranks, Counter()) | counted
        return original(gradients, *args, **kwargs)

    def pieces(self) -> Iterator[tuple[tuple[int, ...], Piece]]:
        """Yield pairs of the ranks over which a norm is summed, and a piece that says how often each element counts.

        Parameters that are not counted are left out. The counts are uint8.
        """
        for ranks, counted in self._counted.items():
            for parameter, part in self._parameters.parts(self._optimizer):
                count = counted[id(parameter)]
                if count == 0:
                    continue
                counts = torch.zeros(local_tensor(parameter).numel(), dtype=torch.uint8)
                begin = part.start or 0
                end = begin + local_tensor(part.main).numel()
                counts[begin:end] = count
                for piece in self._parameters.pieces(parameter, counts):
                    yield ranks, piece


def _find_summed_ranks(gradients: list[torch.Tensor], group: Any) -> tuple[int, ...]:
    """Return the ranks over which the norm of some gradients is summed.

    `group` is the group that Megatron passes. Under FSDP the norm is also summed over the ranks with the
    gradients' other shards. Each rank of those has a group of its own, shifted by the distance of the two ranks.
    """
    ranks = tuple(get_process_group_ranks(group))
    for gradient in gradients:
        if hasattr(gradient, "device_mesh"):
            shard_ranks = get_process_group_ranks(gradient.device_mesh.get_group())
            local_rank = torch.distributed.get_rank()
            all_ranks: set[int] = set()
            for shard_rank in shard_ranks:
                all_ranks.update(rank + shard_rank - local_rank for rank in ranks)
            return tuple(sorted(all_ranks))
    return ranks


def _list_gradients(part: OptimizerPart) -> Iterator[torch.Tensor]:
    """Yield the tensors that Megatron may pass as the gradient of the tensor that the optimizer updates."""
    for name in ("grad", "decoupled_grad"):
        gradient = getattr(part.main, name, None)
        if gradient is not None:
            yield gradient
            if hasattr(gradient, "_local_tensor"):
                # Megatron-FSDP passes the local shard of a DTensor.
                yield local_tensor(gradient)
