"""Short names of process groups, from the descriptions Megatron gives them (`parallel_state`)."""

from __future__ import annotations

import functools

_NAMES = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    # With one instance of the distributed optimizer, which is the default, these are all ranks.
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "world",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "embedding",
    "POSITION_EMBEDDING_GROUP": "position_embedding",
    "MODEL_PARALLEL_GROUP": "mp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_DATA_PARALLEL_GROUP": "expert_dp",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expert_tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "expert_mp",
    "default_pg": "world",
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
