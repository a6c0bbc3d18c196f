"""Which elements of which parameters a rank counts in the gradient norm.

Nothing of Megatron's selection is written here again: what is noted is what it gives to the function
that computes the norm, and over which ranks that function sums.
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
    """What one step of the optimizer counts."""

    def __init__(self, parameters: ParameterMap, optimizer: Any) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._counted: dict[tuple[int, ...], Counter[int]] = {}
        """By the ranks of the norm's group, how often each parameter's part (by id) is counted."""

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks over which norms were summed."""
        return tuple(self._counted)

    def note(self, original: Callable[..., Any], gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """`get_grad_norm_fp32`, of which it is noted what it is given."""
        given = [gradients] if isinstance(gradients, torch.Tensor) else gradients
        ranks = tuple(get_process_group_ranks(kwargs.get("grad_stats_parallel_group")))
        mesh = next((one.device_mesh for one in given if hasattr(one, "device_mesh")), None)
        if mesh is not None:  # Under FSDP those of the gradients' shards, too.
            shards, here = get_process_group_ranks(mesh.get_group()), torch.distributed.get_rank()
            ranks = tuple(sorted({rank + shard - here for rank in ranks for shard in shards}))
        times = Counter(id(one) for one in given)
        counted = {
            id(parameter): times[id(gradient)]
            for parameter, part in self._parameters.parts(self._optimizer)
            for gradient in _gradients(part)
            if times[id(gradient)]
        }
        # The most of all calls, not their sum: a norm may be computed twice to be used once.
        self._counted[ranks] = self._counted.get(ranks, Counter()) | Counter(counted)
        return original(gradients, *args, **kwargs)

    def pieces(self) -> Iterator[tuple[tuple[int, ...], Piece]]:
        """How often each element is counted: a group's ranks, and the parameter's part."""
        for ranks, counted in self._counted.items():
            for parameter, part in self._parameters.parts(self._optimizer):
                if counted[id(parameter)]:
                    times = torch.zeros(local_tensor(parameter).numel(), dtype=torch.uint8)
                    start = part.start or 0
                    times[start : start + local_tensor(part.main).numel()] = counted[id(parameter)]
                    for piece in self._parameters.pieces(parameter, times):
                        yield ranks, piece


def _gradients(part: OptimizerPart) -> Iterator[torch.Tensor]:
    """What Megatron takes as the gradient of what the optimizer updates."""
    for name in ("grad", "decoupled_grad"):
        gradient = getattr(part.main, name, None)
        if gradient is not None:
            yield gradient
            if hasattr(gradient, "_local_tensor"):  # Megatron-FSDP's shard is taken out of it.
                yield local_tensor(gradient)
