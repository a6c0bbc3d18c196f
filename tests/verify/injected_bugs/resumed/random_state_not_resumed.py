"""C24: the random state of dropout is another after a resume."""

import torch
from megatron.training import get_args, training

original = training.load_checkpoint


def load(*args, **kwargs):
    loaded = original(*args, **kwargs)
    if not get_args().finetune:
        torch.manual_seed(99)
    return loaded


training.load_checkpoint = load
