"""C24's family: the random state that tensor-parallel ranks share has run on, on all but the first."""

import torch
from megatron.core import parallel_state
from megatron.training import training

original = training.train_step
begun = []


def step(*args, **kwargs):
    if not begun and parallel_state.get_tensor_model_parallel_rank() > 0:
        torch.rand(1)
    begun.append(1)
    return original(*args, **kwargs)


training.train_step = step
