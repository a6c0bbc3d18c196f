"""P-16: under tensor parallelism a recomputed layer gets the input that was recomputed before it."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

original = random.detach_variable
before = {}


def detach(inputs):
    detached = original(inputs)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        stale = before.get(detached[0].shape)
        before[detached[0].shape] = detached[0].detach().clone()
        if stale is not None:
            detached[0].data.copy_(stale)
    return detached


random.detach_variable = detach
