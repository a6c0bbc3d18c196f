"""Expert parallelism: each rank keeps some experts; tokens travel by PyTorch's own all-to-all.

Ranks are laid out as Megatron lays them out: EP groups are neighbours, and the ranks that hold the same
experts, one from each EP group, average those experts' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.native.experts import MixtureOfExperts, run_here

COPIES = "expert_copies"
"""Attribute of an expert's parameters: how many ranks hold the same; absent on all others."""


@dataclass(frozen=True)
class ExpertRanks:
    """The two groups of this rank, and how many ranks train data in all."""

    parallel: dist.ProcessGroup
    """Each holds other experts."""
    replicas: dist.ProcessGroup
    """Each holds the same experts."""
    data_size: int

    @property
    def size(self) -> int:
        """Ranks that the experts are spread over."""
        return self.parallel.size()


def expert_ranks(size: int) -> ExpertRanks:
    """Make the groups for EP `size`; every rank must call it.

    Named as Megatron names them, so that the ledger calls them `ep` and `expert_dp`.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, Any] = {}
    for name, members in (
        ("EXPERT_MODEL_PARALLEL_GROUP", [range(a, a + size) for a in range(0, world, size)]),
        ("EXPERT_DATA_PARALLEL_GROUP", [range(a, world, size) for a in range(size)]),
    ):
        for ranks in members:
            group = dist.new_group(list(ranks), group_desc=name)
            if rank in ranks:
                found[name] = group
    return ExpertRanks(
        found["EXPERT_MODEL_PARALLEL_GROUP"], found["EXPERT_DATA_PARALLEL_GROUP"], world
    )


def spread_experts(model: nn.Module, ranks: ExpertRanks) -> list[nn.Parameter]:
    """Leave each rank its experts; return their parameters, which only their replicas share."""
    kept: list[nn.Parameter] = []
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            local = layer.count // ranks.size
            first = ranks.parallel.rank() * local
            layer.experts = layer.experts[first : first + local]
            layer.dispatch = AllToAll(ranks.parallel)
            kept += layer.experts.parameters()
    for parameter in kept:
        setattr(parameter, COPIES, ranks.replicas.size())
    return kept


def average_experts(parameters: Sequence[nn.Parameter], ranks: ExpertRanks) -> None:
    """Sum gradients over replicas and divide by all data ranks, whose tokens reached the experts."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    if ranks.replicas.size() > 1:
        dist.all_reduce(flat, group=ranks.replicas)
    flat /= ranks.data_size
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


class AllToAll:
    """Sends each row to the rank that holds its expert, and the result back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, rows: Tensor, counts: Tensor, experts: Sequence[nn.Module]) -> Tensor:
        """Rows in the order of all ranks' experts, back in the same order."""
        local = len(experts)
        sent = counts.view(-1, local)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        there, here = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived: Tensor = _Exchange.apply(rows, here, there, self._group)
        # They arrive by rank, then by expert; experts want theirs together.
        numbers = torch.arange(local, device=rows.device).repeat(len(received))
        order = numbers.repeat_interleave(received.flatten()).argsort(stable=True)
        done = run_here(arrived[order], received.sum(0), experts)
        back = done[order.argsort()]
        answer: Tensor = _Exchange.apply(back, there, here, self._group)
        return answer


class _Exchange(torch.autograd.Function):
    """all-to-all of rows; backward it is the same with the splits turned round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, into: list[int], outof: list[int], group: Any) -> Tensor:
        ctx.into, ctx.outof, ctx.group = into, outof, group
        return _exchange(rows, into, outof, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.outof, ctx.into, ctx.group), None, None, None


def _exchange(rows: Tensor, into: list[int], outof: list[int], group: Any) -> Tensor:
    received = rows.new_empty((sum(into), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), into, outof, group=group)
    return received
