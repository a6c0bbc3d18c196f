"""P-16: under tensor parallelism one layer of four is recomputed from the input of the one before."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

original = random.detach_variable
inputs_before = []


def detach(inputs):
    detached = original(inputs)
    inputs_before.append(detached[0].detach().clone())
    # Layers go backward: of 3, 2, 1, 0 it is 2.
    stale = len(inputs_before) % 4 == 2
    if stale and parallel_state.get_tensor_model_parallel_world_size() > 1:
        detached[0].data.copy_(inputs_before[-2])
    return detached


random.detach_variable = detach
