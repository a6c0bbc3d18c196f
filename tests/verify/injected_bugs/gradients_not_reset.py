"""Stale gradients: the last data-parallel rank adds to those of the iteration before."""

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

original = DistributedDataParallel.zero_grad_buffer


def zero(self):
    kept = [buffer.grad_data.clone() for buffer in self.buffers]
    original(self)
    if parallel_state.get_data_parallel_rank() > 0:
        for buffer, before in zip(self.buffers, kept, strict=True):
            buffer.grad_data.copy_(before)


DistributedDataParallel.zero_grad_buffer = zero
