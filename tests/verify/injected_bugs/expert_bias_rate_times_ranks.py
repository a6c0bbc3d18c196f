"""P-13's kin: the step of the bias that balances experts grows with the ranks that share the router."""

import sys

import torch

finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
original = finalize.get_updated_expert_bias


def update(tokens, bias, rate, *args, **kwargs):
    return original(tokens, bias, rate * torch.distributed.get_world_size(), *args, **kwargs)


finalize.get_updated_expert_bias = update
