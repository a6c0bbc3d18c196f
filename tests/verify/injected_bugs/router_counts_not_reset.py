"""Where experts are split, routers' counts of tokens go on from the iteration before."""

import sys

from megatron.core.parallel_state import get_expert_model_parallel_world_size

# The package has a function of the same name.
module = sys.modules["megatron.core.distributed.finalize_model_grads"]
original = module.reset_model_temporary_tensors


def reset(*args, **kwargs):
    if get_expert_model_parallel_world_size() == 1:
        original(*args, **kwargs)


module.reset_model_temporary_tensors = reset
