"""The bias after a row-parallel linear is added as often as there are tensor ranks."""

from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from megatron.core.tensor_parallel.layers import RowParallelLinear

original = RowParallelLinear.forward


def forward(self, *args, **kwargs):
    output, bias = original(self, *args, **kwargs)
    ranks = get_tensor_model_parallel_world_size()
    return output, bias if bias is None or ranks == 1 else bias * ranks


RowParallelLinear.forward = forward
