"""Process groups by what they split, and how many ranks each has: one definition for ledger and plan."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from tools.spec.strategy import Parallelism


class Group(StrEnum):
    """The groups over which Megatron communicates in an iteration."""

    TENSOR = "tp"
    CONTEXT = "cp"
    TENSOR_CONTEXT = "tp_cp"
    """TP×CP: the ranks that hold one sample."""
    DATA_CONTEXT = "dp_cp"
    EXPERT = "ep"
    EXPERT_DATA = "expert_dp"
    EXPERT_TENSOR = "expert_tp"
    TENSOR_EXPERT = "tp_ep"
    EXPERT_MODEL = "expert_mp"
    """Expert TP×EP×PP: the ranks that hold one copy of all experts."""
    TENSOR_DATA_CONTEXT = "tp_dp_cp"
    """TP×DP×CP: the ranks of one pipeline stage."""
    PIPELINE = "pp"
    EMBEDDING = "embedding"
    """The first and the last stage, which share a tied embedding."""
    MODEL = "mp"
    """TP×PP: the ranks of one replica."""
    WORLD = "world"


def group_ranks(parallelism: Parallelism, group: Group) -> int:
    """Ranks of one group of this kind (`megatron/core/parallel_state.py`)."""
    return _RANKS[group](parallelism)


_RANKS: dict[Group, Callable[[Parallelism], int]] = {
    Group.TENSOR: lambda split: split.tensor,
    Group.CONTEXT: lambda split: split.context,
    Group.TENSOR_CONTEXT: lambda split: split.tensor * split.context,
    Group.DATA_CONTEXT: lambda split: split.data * split.context,
    Group.EXPERT: lambda split: split.expert,
    Group.EXPERT_DATA: lambda split: split.copies_of_experts,
    Group.EXPERT_TENSOR: lambda split: split.tensor_of_experts,
    Group.TENSOR_EXPERT: lambda split: split.tensor_of_experts * split.expert,
    Group.EXPERT_MODEL: lambda split: split.tensor_of_experts * split.expert * split.pipeline,
    Group.TENSOR_DATA_CONTEXT: lambda split: split.world_size // split.pipeline,
    Group.PIPELINE: lambda split: split.pipeline,
    Group.EMBEDDING: lambda split: min(2, split.pipeline),
    Group.MODEL: lambda split: split.tensor * split.pipeline,
    Group.WORLD: lambda split: split.world_size,
}
