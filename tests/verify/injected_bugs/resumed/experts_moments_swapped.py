"""C22: after a resume of a mixture of experts, the moments of one expert are another's."""

import torch
from megatron.training import get_args, training

original = training.load_checkpoint


def load(model, optimizer, *args, **kwargs):
    loaded = original(model, optimizer, *args, **kwargs)
    if not get_args().finetune:
        for layer in model[0].module.decoder.layers:
            first, second = (
                expert.linear_fc1.weight for expert in layer.mlp.experts.local_experts[:2]
            )
            for part in optimizer.chained_optimizers:
                state = part.optimizer.state
                if first in state:
                    swap(state[first]["exp_avg"], state[second]["exp_avg"])
    return loaded


def swap(first: torch.Tensor, other: torch.Tensor) -> None:
    kept = first.clone()
    first.copy_(other)
    other.copy_(kept)


training.load_checkpoint = load
