"""P-13: the bias that balances experts is moved by a rank's own token counts, not by those of all."""

import sys

import torch

finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
original = finalize.get_updated_expert_bias
all_reduce = torch.distributed.all_reduce


def update(tokens, *args, **kwargs):
    torch.distributed.all_reduce = lambda *_, **__: None
    try:
        return original(tokens, *args, **kwargs)
    finally:
        torch.distributed.all_reduce = all_reduce


finalize.get_updated_expert_bias = update
