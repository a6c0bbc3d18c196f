"""Sequence parallelism: the embeddings' scatter gives back the gradient of a rank's own rows alone."""

import torch
from megatron.core.tensor_parallel import mappings


def backward(ctx, grad):
    full = torch.zeros(
        (grad.shape[0] * ctx.group.size(), *grad.shape[1:]), dtype=grad.dtype, device=grad.device
    )
    full[grad.shape[0] * ctx.group.rank() : grad.shape[0] * (ctx.group.rank() + 1)] = grad
    return full, None


mappings._ScatterToSequenceParallelRegion.backward = staticmethod(backward)
