"""Tensor-parallel ranks draw with one seed: the shards of a weight are copies of each other."""

from megatron.core import tensor_parallel

original = tensor_parallel.model_parallel_cuda_manual_seed


def seed(*args, **kwargs):
    return original(*args, **{**kwargs, "tp_rank": 0})


tensor_parallel.model_parallel_cuda_manual_seed = seed
