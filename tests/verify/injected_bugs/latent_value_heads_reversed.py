"""MLA: on tensor-parallel ranks after the first, the heads' values are in reversed order."""

from megatron.core import parallel_state
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

original = MLASelfAttention.get_query_key_value_tensors


def tensors(self, *args, **kwargs):
    query, key, value, *more_outputs = original(self, *args, **kwargs)
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        value = value.flip(-2)
    return (query, key, value, *more_outputs)


MLASelfAttention.get_query_key_value_tensors = tensors
