"""C21: a gated MLP's rows are loaded at another degree of TP as if they were one matrix."""

from megatron.core.transformer import mlp
from megatron.training import get_args, training

original, split = training.load_checkpoint, mlp.apply_swiglu_sharded_factory


def load(*args, **kwargs):
    if not get_args().finetune:
        mlp.apply_swiglu_sharded_factory = lambda tensor, *arguments, **named: tensor
    try:
        return original(*args, **kwargs)
    finally:
        mlp.apply_swiglu_sharded_factory = split


training.load_checkpoint = load
