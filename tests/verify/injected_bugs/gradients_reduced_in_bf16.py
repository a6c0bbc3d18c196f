"""P-28: gradients travel in bf16 where fp32 was asked for."""

from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

original = _ParamAndGradBucketGroup.start_grad_sync


def start(self, *args, **kwargs):
    if parallel_state.get_data_parallel_world_size() > 1:
        for bucket in self.buckets:
            bucket.grad_data.copy_(bucket.grad_data.bfloat16())
    return original(self, *args, **kwargs)


_ParamAndGradBucketGroup.start_grad_sync = start
