"""P-11: under --calculate-per-token-loss each rank divides by its own number of tokens, not by all."""

import torch
from megatron.training import training

original = training.finalize_model_grads
all_reduce = torch.distributed.all_reduce


def finalize(model, num_tokens=None, **kwargs):
    def reduce(tensor, *args, **named):
        return None if tensor is num_tokens else all_reduce(tensor, *args, **named)

    torch.distributed.all_reduce = reduce
    try:
        original(model, num_tokens, **kwargs)
    finally:
        torch.distributed.all_reduce = all_reduce


training.finalize_model_grads = finalize
