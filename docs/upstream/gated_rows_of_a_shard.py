"""Cures gated-rows-of-a-shard: a shard of torch FSDP2 has rows in a row, not a part of each half.

Without tensor parallelism the halves of the whole follow each other, as in the tensor itself.
"""

from megatron.core import parallel_state
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import experts

split = mlp.apply_swiglu_sharded_factory


def of_whole_halves(original, offsets, *args, **kwargs):
    parts = original.axis_fragmentations[len(offsets)]
    if parallel_state.get_tensor_model_parallel_world_size() == 1 and parts > 1:
        return original
    return split(original, offsets, *args, **kwargs)


mlp.apply_swiglu_sharded_factory = experts.apply_swiglu_sharded_factory = of_whole_halves
