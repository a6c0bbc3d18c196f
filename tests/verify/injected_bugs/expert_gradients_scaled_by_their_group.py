"""C5 (!2564): gradients of experts are divided by the ranks that share an expert, not by all."""

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket

original = _ParamAndGradBucket.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if not getattr(self.params_list[0], "allreduce", True):
        from megatron.core import parallel_state

        self.gradient_scaling_factor = 1.0 / parallel_state.get_expert_data_parallel_world_size()


_ParamAndGradBucket.__init__ = init
