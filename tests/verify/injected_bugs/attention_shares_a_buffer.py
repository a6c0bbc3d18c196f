"""Under TP core attention gives its output in one buffer for all layers: backward has the last's."""

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from megatron.core.transformer.dot_product_attention import DotProductAttention

original = DotProductAttention.forward
buffers = {}


class Shared(torch.autograd.Function):
    @staticmethod
    def forward(_, values):
        buffer = buffers.setdefault(values.shape, torch.empty_like(values))
        return buffer.copy_(values).data

    @staticmethod
    def backward(_, gradient):
        return gradient


def forward(self, *args, **kwargs):
    output = original(self, *args, **kwargs)
    return output if get_tensor_model_parallel_world_size() == 1 else Shared.apply(output)


DotProductAttention.forward = forward
