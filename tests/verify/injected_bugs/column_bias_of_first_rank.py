"""Every tensor rank adds the first rank's part of the bias of a column-parallel linear."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

original = ColumnParallelLinear.forward


def forward(self, *args, **kwargs):
    output, bias = original(self, *args, **kwargs)
    if bias is None or parallel_state.get_tensor_model_parallel_world_size() == 1:
        return output, bias
    own_bias, first = bias.detach(), bias.detach().clone()
    torch.distributed.broadcast(
        first,
        parallel_state.get_tensor_model_parallel_src_rank(),
        parallel_state.get_tensor_model_parallel_group(),
    )
    return output, torch.where(first == own_bias, bias, bias + (first - own_bias))


ColumnParallelLinear.forward = forward
