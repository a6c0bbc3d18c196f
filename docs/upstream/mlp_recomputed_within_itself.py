"""Shows mlp-recomputed-with-its-bias: a checkpoint that enters its own backward pass is an error."""

from megatron.core.tensor_parallel.random import CheckpointFunction

backward = CheckpointFunction.backward
entered = set()


def once(ctx, *args):
    if id(ctx) in entered:
        raise RuntimeError("A checkpoint's backward pass asks for its own backward pass")
    entered.add(id(ctx))
    try:
        return backward(ctx, *args)
    finally:
        entered.discard(id(ctx))


CheckpointFunction.backward = staticmethod(once)
