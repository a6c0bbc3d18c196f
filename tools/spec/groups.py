"""Process groups by what they split, and how many ranks each has: one definition for ledger and plan."""

from __future__ import annotations

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
    expert_tensor, world = parallelism.tensor_of_experts, parallelism.world_size
    return {
        Group.TENSOR: parallelism.tensor,
        Group.CONTEXT: parallelism.context,
        Group.TENSOR_CONTEXT: parallelism.tensor * parallelism.context,
        Group.DATA_CONTEXT: parallelism.data * parallelism.context,
        Group.EXPERT: parallelism.expert,
        Group.EXPERT_DATA: parallelism.copies_of_experts,
        Group.EXPERT_TENSOR: expert_tensor,
        Group.TENSOR_EXPERT: expert_tensor * parallelism.expert,
        Group.EXPERT_MODEL: expert_tensor * parallelism.expert * parallelism.pipeline,
        Group.TENSOR_DATA_CONTEXT: world // parallelism.pipeline,
        Group.PIPELINE: parallelism.pipeline,
        Group.EMBEDDING: min(2, parallelism.pipeline),
        Group.MODEL: parallelism.tensor * parallelism.pipeline,
        Group.WORLD: world,
    }[group]
