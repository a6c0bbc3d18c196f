"""P-16b: under tensor parallelism a recomputed layer draws new dropout masks."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

original = random._set_all_rng_states
calls = []


def restore(*states):
    calls.append(1)
    # A recomputation sets the state of its forward pass, and afterwards the present one.
    of_forward = len(calls) % 2 == 1
    if not (of_forward and parallel_state.get_tensor_model_parallel_world_size() > 1):
        original(*states)


random._set_all_rng_states = restore
