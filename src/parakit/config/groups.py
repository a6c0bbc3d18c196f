"""Megatron's process groups: how many ranks each has, and their names in logs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum

from parakit.config.strategy import Parallelism


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


def group_size(parallelism: Parallelism, group: Group) -> int:
    """Return the number of ranks in one group of this kind (`megatron/core/parallel_state.py`)."""
    return _RANKS[group](parallelism)


_RANKS: dict[Group, Callable[[Parallelism], int]] = {
    Group.TENSOR: lambda split: split.tensor,
    Group.CONTEXT: lambda split: split.context,
    Group.TENSOR_CONTEXT: lambda split: split.tensor * split.context,
    Group.DATA_CONTEXT: lambda split: split.data * split.context,
    Group.EXPERT: lambda split: split.expert,
    Group.EXPERT_DATA: lambda split: split.expert_data,
    Group.EXPERT_TENSOR: lambda split: split.effective_expert_tensor,
    Group.TENSOR_EXPERT: lambda split: split.effective_expert_tensor * split.expert,
    Group.EXPERT_MODEL: lambda split: split.effective_expert_tensor * split.expert * split.pipeline,
    Group.TENSOR_DATA_CONTEXT: lambda split: split.world_size // split.pipeline,
    Group.PIPELINE: lambda split: split.pipeline,
    Group.EMBEDDING: lambda split: min(2, split.pipeline),
    Group.MODEL: lambda split: split.tensor * split.pipeline,
    Group.WORLD: lambda split: split.world_size,
}

# Groups by the descriptions that Megatron gives them (`parallel_state`). Values that are texts are
# groups whose communication the planner does not count.
_GROUP_NAMES: dict[str, str] = {
    "TENSOR_MODEL_PARALLEL_GROUP": Group.TENSOR,
    "CONTEXT_PARALLEL_GROUP": Group.CONTEXT,
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": Group.DATA_CONTEXT,
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": Group.DATA_CONTEXT,
    # By default there is one instance of the distributed optimizer, whose group has all ranks.
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": Group.WORLD,
    "PIPELINE_MODEL_PARALLEL_GROUP": Group.PIPELINE,
    "EMBEDDING_GROUP": Group.EMBEDDING,
    "POSITION_EMBEDDING_GROUP": "position_embedding",
    "MODEL_PARALLEL_GROUP": Group.MODEL,
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": Group.TENSOR_CONTEXT,
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": Group.TENSOR_DATA_CONTEXT,
    "EXPERT_MODEL_PARALLEL_GROUP": Group.EXPERT,
    "EXPERT_DATA_PARALLEL_GROUP": Group.EXPERT_DATA,
    "EXPERT_TENSOR_PARALLEL_GROUP": Group.EXPERT_TENSOR,
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": Group.TENSOR_EXPERT,
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": Group.EXPERT_MODEL,
    "default_pg": Group.WORLD,
}
# Suffixes of groups with the same ranks as another group: gloo's copies, and those of weight
# rematerialisation (0.19).
_GROUP_SUFFIXES = ("_GLOO", "_WITH_GTP_REMAT", "_WITH_EGTP")


@functools.cache
def group_name(description: str) -> str:
    """Return the value of `Group` for the name that Megatron gives a process group.

    Suffixes that Megatron adds to its names are ignored. A name that is not Megatron's is returned unchanged.
    """
    plain = description
    for suffix in _GROUP_SUFFIXES:
        plain = plain.removesuffix(suffix)
    return _GROUP_NAMES.get(plain, description)
