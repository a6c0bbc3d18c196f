"""Experts' gradients are summed over the ranks that hold other experts, not the same."""

from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

start = Group.start_grad_sync


def start_sync(self, *args, **kwargs):
    if parallel_state.get_expert_model_parallel_world_size() > 1 and all(
        not getattr(p, "allreduce", True) for b in self.buckets for p in b.params_list
    ):
        self.data_parallel_group = parallel_state.get_expert_model_parallel_group()
    start(self, *args, **kwargs)


Group.start_grad_sync = start_sync
