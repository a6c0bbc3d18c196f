"""Short names of process groups, from the descriptions Megatron gives them (`parallel_state`)."""

from __future__ import annotations

import functools

from tools.spec.groups import Group

_NAMES: dict[str, str] = {
    "TENSOR_MODEL_PARALLEL_GROUP": Group.TENSOR,
    "CONTEXT_PARALLEL_GROUP": Group.CONTEXT,
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": Group.DATA_CONTEXT,
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": Group.DATA_CONTEXT,
    # With one instance of the distributed optimizer, which is the default, these are all ranks.
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
# Weight rematerialisation (0.19) and gloo twins are the same split under another name.
_SUFFIXES = ("_GLOO", "_WITH_GTP_REMAT", "_WITH_EGTP")


@functools.cache
def group_name(description: str) -> str:
    """`tp`, `dp_cp`, …; a description that is not Megatron's is returned as it is."""
    plain = description
    for suffix in _SUFFIXES:
        plain = plain.removesuffix(suffix)
    return _NAMES.get(plain, description)
