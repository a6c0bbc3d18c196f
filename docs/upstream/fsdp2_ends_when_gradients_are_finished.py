"""Cures fsdp2-ends-when-gradients-are-finished: torch FSDP2 takes the argument that it is given."""

from megatron.core.distributed.torch_fully_sharded_data_parallel import (
    TorchFullyShardedDataParallel,
)


def finish_grad_sync(self, force_all_reduce=False):
    """FSDP2 has reduced them in the backward pass."""


TorchFullyShardedDataParallel.finish_grad_sync = finish_grad_sync
