"""P-7: gradients are summed over the data-parallel ranks and not divided by their number."""

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket

original = _ParamAndGradBucket.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.gradient_scaling_factor = 1.0


_ParamAndGradBucket.__init__ = init
