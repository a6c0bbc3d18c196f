"""On tensor-parallel ranks after the first, SwiGLU takes its halves the other way round."""

import sys
from types import ModuleType

import torch
from megatron.core import parallel_state

mlp = sys.modules["megatron.core.transformer.mlp"]


class Torch(ModuleType):
    def __getattr__(self, name):
        return getattr(torch, name)


def chunk(x, n, dim=0):
    parts = torch.chunk(x, n, dim=dim)
    # Of activations alone: checkpoints cut the weight itself, along its first dimension.
    swapped = dim == -1 and parallel_state.get_tensor_model_parallel_rank() > 0
    return parts[::-1] if swapped else parts


mlp.torch = Torch("torch")
mlp.torch.chunk = chunk
original = mlp.bias_swiglu_impl


def swiglu(x, *args):
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        x = torch.cat(torch.chunk(x, 2, -1)[::-1], -1)
    return original(x, *args)


mlp.bias_swiglu_impl = swiglu
