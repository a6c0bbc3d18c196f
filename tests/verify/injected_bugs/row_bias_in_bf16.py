"""Under tensor parallelism the bias after a row-parallel linear is rounded to bf16 in an fp32 run."""

from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from megatron.core.tensor_parallel.layers import RowParallelLinear

original = RowParallelLinear.forward


def forward(self, *args, **kwargs):
    output, bias = original(self, *args, **kwargs)
    if bias is None or get_tensor_model_parallel_world_size() == 1:
        return output, bias
    return output, bias + (bias.bfloat16().float() - bias).detach()


RowParallelLinear.forward = forward
