"""MLA: the compressed queries, keys and values are gathered with the ranks' parts in the wrong order."""

from megatron.core.transformer import multi_latent_attention as mla

original = mla.gather_from_tensor_model_parallel_region


def gather(input_, group=None):
    return original(input_, group).roll(input_.size(-1), -1)


mla.gather_from_tensor_model_parallel_region = gather
