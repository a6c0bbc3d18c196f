"""C28 (8edd0c29): gradients are divided by the data-parallel ranks, not by the context-parallel."""

from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket

original = _ParamAndGradBucket.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.gradient_scaling_factor *= parallel_state.get_context_parallel_world_size()


_ParamAndGradBucket.__init__ = init
