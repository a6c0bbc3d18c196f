"""Cures fsdp2-gradients-not-divided: with a loss by token, torch FSDP2 divides gradients by tokens."""

import torch
from megatron.core.distributed.torch_fully_sharded_data_parallel import (
    TorchFullyShardedDataParallel,
)


def scale_gradients(self, scaling_factor):
    ranks = self.process_group.size()  # FSDP2 averages over these, and a sum is divided by tokens.
    with torch.no_grad():
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scaling_factor * ranks)


TorchFullyShardedDataParallel.scale_gradients = scale_gradients
